# The one file to edit.

# Slurm: how much, where, how long.
export SBATCH_NODES=2
export SBATCH_PARTITION=batch
export SBATCH_ACCOUNT=
export SBATCH_TIME=04:00:00

# What the job gets of each node, and Ray may use. With EXCLUSIVE empty, other jobs may share the nodes.
CPUS_PER_NODE=${CPUS_PER_NODE:-32}
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
MEMORY_PER_NODE=${MEMORY_PER_NODE:-0} # as of sbatch --mem; 0 for all of it
EXCLUSIVE=${EXCLUSIVE-yes}

# Modules and the environment that has hydro_rasda, on every node.
activate() {
    : # module load ...; source .venv/bin/activate
}

# What runs on the head node once all nodes are there; Ray's address is in RAY_ADDRESS.
if [[ -z "${RUN+x}" ]]; then
    RUN=(python examples/ray_script.py --address auto --storage "$HOME/ray_results")
fi

# A folder on a disk of each node's own, for Ray's sockets and logs: at most 36 characters, as sockets have short names.
export RAY_TMPDIR=${RAY_TMPDIR:-/tmp}

RAY_PORT=${RAY_PORT:-} # empty: a free one, derived from the job's number
START_LIMIT_S=${START_LIMIT_S:-300}
