#!/bin/bash
# Submits a chain of jobs that train one run, each from where the one before stopped: for sites that
# forbid requeueing.  A job starts only when the one before was stopped (exit status 75) or failed;
# when the run has finished, Slurm removes what is left of the chain.  From the repository:
#   slurm/chain.sh JOBS FOLDER [options of sbatch] slurm/train.sbatch [CONFIG] [ARGUMENTS]
# FOLDER is that of the run.
set -eu
jobs=${1:?how many jobs} MESHMPI_OUT=${2:?the folder of the run} MESHMPI_REQUEUE=0
export MESHMPI_OUT MESHMPI_REQUEUE
shift 2
last=""
for _ in $(seq "$jobs"); do
    after=${last:+--dependency=afternotok:$last}
    # shellcheck disable=SC2086  # nothing or one word
    last=$(sbatch --parsable --no-requeue --kill-on-invalid-dep=yes $after "$@")
    last=${last%%;*} # with several clusters it names the cluster, too
    echo "$last"
done
