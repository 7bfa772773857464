# This is the one file to edit.

# Settings of Slurm: the number of nodes, the partition, the account and the time.
export SBATCH_NODES=2
export SBATCH_PARTITION=batch
export SBATCH_ACCOUNT=
export SBATCH_TIME=04:00:00

# The part of each node that the job gets, and Ray may use. If EXCLUSIVE is empty, other jobs may share the nodes.
CPUS_PER_NODE=${CPUS_PER_NODE:-32}
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
MEMORY_PER_NODE=${MEMORY_PER_NODE:-0} # as for sbatch --mem; 0 for all memory
EXCLUSIVE=${EXCLUSIVE-yes}

# Load modules, and the environment that has hydro_rasda, on every node.
activate() {
    : # module load ...; source .venv/bin/activate
}

# The command that runs on the head node once all nodes are up. Ray's address is in RAY_ADDRESS.
if [[ -z "${RUN+x}" ]]; then
    RUN=(python examples/ray_script.py --address auto --storage "$HOME/ray_results")
fi

# A folder on a local disk of each node, for Ray's sockets and logs. It has at most 36 characters, because the paths of
# sockets must be short.
export RAY_TMPDIR=${RAY_TMPDIR:-/tmp}

RAY_PORT=${RAY_PORT:-} # if empty, a free port that depends on the job's number
START_LIMIT_S=${START_LIMIT_S:-300}
