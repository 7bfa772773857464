#!/usr/bin/env bash
# Submit cluster.sh with the settings of settings.sh: bash examples/slurm/submit.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/settings.sh"
options=(--nodes "$SBATCH_NODES" --partition "$SBATCH_PARTITION" --time "$SBATCH_TIME" --ntasks-per-node 1)
options+=(--cpus-per-task "$CPUS_PER_NODE" --mem "$MEMORY_PER_NODE")
((GPUS_PER_NODE == 0)) || options+=(--gpus-per-node "$GPUS_PER_NODE")
[[ -z "$EXCLUSIVE" ]] || options+=(--exclusive)
[[ -z "$SBATCH_ACCOUNT" ]] || options+=(--account "$SBATCH_ACCOUNT")
exec sbatch "${options[@]}" --export "ALL,HYDRO_RASDA_SLURM=$here" "$here/cluster.sh"
