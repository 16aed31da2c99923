# What the batch scripts share.  Sourced, not submitted.
#
# Variables, all with defaults:
#   VENV             the virtual environment                                (.venv)
#   MESHMPI_LAUNCH   mpirun: the launcher of the MPI in the environment     (mpirun)
#                    pmix, pmi2: srun with that interface
#                    `srun --mpi=list` says what the site has; Open MPI 5 wants pmix, MPICH pmi2

set -u
if [ ! -e "${VENV:=.venv}/bin/meshmpi" ]; then
    echo "there is no $VENV/bin/meshmpi below $PWD: run 'make train' once or set VENV," \
        "and submit from the repository" >&2
    exit 1
fi
PATH="$(cd "$VENV" && pwd)/bin:$PATH"
# One BLAS thread per core of the task: anything else oversubscribes or idles.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # srun no longer takes it from sbatch

# Starts "meshmpi ARGUMENTS" on all tasks of the job and waits for its end.  Signals that arrive
# meanwhile are handed on: the trainer finishes its step, saves and exits with status 75.
run_meshmpi() {
    case "${MESHMPI_LAUNCH:=mpirun}" in
    mpirun) set -- python -m meshmpi.runtime.launch -n "$SLURM_NTASKS" -- meshmpi "$@" ;;
    pmix | pmi2) set -- srun --mpi="$MESHMPI_LAUNCH" --kill-on-bad-exit=0 meshmpi "$@" ;;
    *) echo "MESHMPI_LAUNCH is '$MESHMPI_LAUNCH': use mpirun, pmix or pmi2" >&2 && return 2 ;;
    esac
    "$@" &
    local child=$! status
    trap 'kill -USR1 '"$child"' 2>/dev/null' USR1
    trap 'kill -TERM '"$child"' 2>/dev/null' TERM
    # A signal interrupts wait, so wait again until the job itself has ended.
    while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done
    trap - USR1 TERM
    if [ "$status" -gt 128 ]; then # was that the signal or the job?
        wait "$child"
        local last=$?
        [ "$last" -eq 127 ] || status=$last
    fi
    return "$status"
}

# --resume where there is a checkpoint of this run, else nothing.
resume_if_possible() {
    if compgen -G "$1/checkpoints/*/manifest.json" >/dev/null; then echo --resume; fi
}

# Trains CONFIG into the folder OUT with further ARGUMENTS, from the newest checkpoint on; when a signal
# stopped it, the job goes back into the queue.
train_and_requeue() {
    local config=$1 out=$2 status
    shift 2
    # shellcheck disable=SC2046  # nothing or one word
    run_meshmpi train "$config" --out "$out" $(resume_if_possible "$out") "$@"
    status=$?
    if [ "$status" -eq 75 ]; then
        echo "stopped by a signal, state saved in $out: back into the queue"
        scontrol requeue "$SLURM_JOB_ID" # of an array, too: each task has an id of its own
    fi
    return "$status"
}
