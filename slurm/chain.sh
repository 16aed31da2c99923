#!/bin/bash
# Submits a chain of jobs that train one run, for sites that forbid requeueing. Each job continues where
# the previous one stopped, and starts only if that was stopped (exit status 75) or failed. When the run
# has finished, Slurm removes the rest of the chain. From the repository:
#   slurm/chain.sh JOBS FOLDER [options of sbatch] slurm/train.sbatch [CONFIG] [ARGUMENTS]
# FOLDER is the folder of the run.
set -eu
jobs=${1:?how many jobs} MESHMPI_OUT=${2:?the folder of the run} MESHMPI_REQUEUE=0
export MESHMPI_OUT MESHMPI_REQUEUE
shift 2
last=""
for _ in $(seq "$jobs"); do
    after=${last:+--dependency=afternotok:$last}
    # shellcheck disable=SC2086  # nothing or one word
    last=$(sbatch --parsable --no-requeue --kill-on-invalid-dep=yes $after "$@")
    last=${last%%;*} # with several clusters it also names the cluster
    echo "$last"
done
