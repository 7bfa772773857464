# The one file to edit.

# Slurm: how much, where, how long.
export SBATCH_NODES=2
export SBATCH_PARTITION=batch
export SBATCH_ACCOUNT=
export SBATCH_TIME=04:00:00

# What Ray may use on each node.
CPUS_PER_NODE=${CPUS_PER_NODE:-32}
GPUS_PER_NODE=${GPUS_PER_NODE:-4}

# Modules and the environment that has hydro_rasda, on every node.
activate() {
    : # module load ...; source .venv/bin/activate
}

# What runs on the head node once all nodes are there; Ray's address is in RAY_ADDRESS.
if [[ -z "${RUN+x}" ]]; then
    RUN=(python examples/ray_script.py --address auto --storage "$HOME/ray_results")
fi

RAY_PORT=${RAY_PORT:-6379}
START_LIMIT_S=${START_LIMIT_S:-300}
