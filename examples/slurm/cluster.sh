#!/usr/bin/env bash
# Inside a Slurm job: Ray's head on the first node, a worker on each other one, then the run. Ray ends with the job.
set -euo pipefail
# sbatch runs a copy of this file from its spool; submit.sh says where the original is.
here=${HYDRO_RASDA_SLURM:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
source "$here/settings.sh"
activate
export RAY_USAGE_STATS_ENABLED=0
# Ray lets only those in that know this; srun hands it to each node in its environment.
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
head_ip=$(srun --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS=$head_ip:$RAY_PORT
resources=(--num-cpus "$CPUS_PER_NODE" --num-gpus "$GPUS_PER_NODE" --disable-usage-stats)

started=()
finish() {
    ((${#started[@]} == 0)) || kill "${started[@]}" 2>/dev/null || true
    wait || true
}
trap finish EXIT

# Returns once so many nodes are up.
wait_for() {
    python - "$1" "$START_LIMIT_S" <<'WAIT'
import sys, time, ray
wanted, limit = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while True:
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        alive = sum(node["Alive"] for node in ray.nodes())
        ray.shutdown()
    except ConnectionError:
        alive = 0
    if alive >= wanted:
        break
    if time.monotonic() > limit:
        sys.exit(f"{alive} of {wanted} nodes came up; see START_LIMIT_S in settings.sh")
    time.sleep(1)
print(f"{alive} of the job's nodes are up", flush=True)
WAIT
}

echo "head on $head, $RAY_ADDRESS"
srun --nodes 1 --ntasks 1 --nodelist "$head" --overlap \
    ray start --head --node-ip-address "$head_ip" --port "$RAY_PORT" --include-dashboard false "${resources[@]}" --block &
started+=($!)
wait_for 1
for node in "${nodes[@]:1}"; do
    echo "worker on $node"
    srun --nodes 1 --ntasks 1 --nodelist "$node" --overlap \
        ray start --address "$RAY_ADDRESS" "${resources[@]}" --block &
    started+=($!)
done
wait_for ${#nodes[@]}

"${RUN[@]}"
