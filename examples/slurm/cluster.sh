#!/usr/bin/env bash
# Inside a Slurm job, start Ray's head on the first node and a worker on each other one, then the command RUN of
# settings.sh. Ray ends with the job.
set -euo pipefail
# sbatch runs a copy of this file from its spool. submit.sh says where the original is.
here=${HYDRO_RASDA_SLURM:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
source "$here/settings.sh"
activate
export RAY_USAGE_STATS_ENABLED=0
if ((${#RAY_TMPDIR} > 36)); then
    echo "RAY_TMPDIR is $RAY_TMPDIR, but must have at most 36 characters: Ray's sockets lie under it" >&2
    exit 1
fi
# Ray admits only processes that know this token. srun passes it to each node in its environment.
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# Find two free ports of this node, where Ray's head runs. Other jobs may share the node, so the search starts at a port
# that depends on the job's number.
read -r port client_port < <(python - "${SLURM_JOB_ID:-0}" "$RAY_PORT" <<'PORTS'
import socket, sys
start, wanted = 20000 + 2 * int(sys.argv[1]) % 12000, [int(port) for port in sys.argv[2:] if port]
def is_free(port):
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
free = (port for port in range(start, 65536) if port not in wanted and is_free(port))
print(*[*wanted, next(free), next(free)][:2])
PORTS
)

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
head_ip=$(srun --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS=$head_ip:$port
resources=(--num-cpus "$CPUS_PER_NODE" --num-gpus "$GPUS_PER_NODE" --disable-usage-stats)
# A step gets the cores, memory and GPUs of its job on the node only if it asks for them.
step=(--nodes 1 --ntasks 1 --overlap --cpus-per-task "$CPUS_PER_NODE" --mem 0)
((GPUS_PER_NODE == 0)) || step+=(--gpus-per-node "$GPUS_PER_NODE")

logs=$(mktemp -d)
started=() watched=()
finish() {
    ((${#started[@]} == 0)) || kill "${started[@]}" 2>/dev/null || true
    wait || true
    rm -rf "$logs"
}
trap finish EXIT

# Start Ray on a node, in the background.
start_on() {
    local node=$1 log=$logs/$1
    srun --nodelist "$node" "${step[@]}" ray start "${@:2}" "${resources[@]}" --block >"$log" 2>&1 &
    started+=($!)
    watched+=("$!" "$node" "$log")
}

# Return once this number of nodes is up. Fail if Ray ends on one of them, or if START_LIMIT_S is over.
wait_for() {
    python - "$1" "$START_LIMIT_S" "${watched[@]}" <<'WAIT'
import subprocess, sys, time
from pathlib import Path
wanted, limit = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
watched = list(zip(*[iter(sys.argv[3:])] * 3))
# This runs in a separate process, because Ray may try for minutes to reach a head that is not there.
ask = """
import ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""
alive = 0
def ended():
    for pid, node, log in watched:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "Z"
        if state == "Z":
            return f"Ray ended on {node} before the cluster was up. Its last lines:\n" + "".join(
                f"  {line}\n" for line in Path(log).read_text(errors="replace").splitlines()[-20:]
            )
    if time.monotonic() > limit:
        return f"{alive} of {wanted} nodes came up; see START_LIMIT_S in settings.sh"
while alive < wanted:
    asking = subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while not (why := ended()) and asking.poll() is None:
        time.sleep(0.2)
    asking.kill()
    if why:
        sys.exit(why)
    answer = asking.communicate()[0].split()
    alive = int(answer[-1]) if answer else 0
print(f"{alive} of the job's nodes are up", flush=True)
WAIT
}

echo "head on $head, $RAY_ADDRESS"
start_on "$head" --head --node-ip-address "$head_ip" --port "$port" --ray-client-server-port "$client_port" \
    --include-dashboard false
wait_for 1
for node in "${nodes[@]:1}"; do
    echo "worker on $node"
    start_on "$node" --address "$RAY_ADDRESS"
done
wait_for ${#nodes[@]}

"${RUN[@]}"
