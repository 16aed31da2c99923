# Functions shared by the batch scripts. This file is sourced, not submitted.
#
# Variables, all with defaults:
#   VENV             the virtual environment                                (.venv)
#   MESHMPI_LAUNCH   mpirun: the launcher of the MPI in the environment     (mpirun)
#                    pmix, pmi2: srun with that interface
#                    `srun --mpi=list` lists what the site has; Open MPI 5 needs pmix, MPICH pmi2
#   MESHMPI_MODULES  modules to load first, blank-separated: the site's MPI and Python     (none)
#   MESHMPI_OUT      folder of the run, the same for all jobs of a chain    (runs/<config>-<job id>)
#   MESHMPI_REQUEUE  1: requeue a run that was stopped, or lost a rank or a node        (1)
#   MESHMPI_MOST_RESTARTS  how often a job that lost a rank or a node is requeued       (5)

set -u
cd "${SLURM_SUBMIT_DIR:-.}" || exit 1
if [ -n "${MESHMPI_MODULES:-}" ]; then
    # shellcheck disable=SC2086  # several words
    module load $MESHMPI_MODULES || exit 1
fi
if [ ! -e "${VENV:=.venv}/bin/meshmpi" ]; then
    echo "there is no $VENV/bin/meshmpi below $PWD: run 'make train' once or set VENV," \
        "and submit from the repository" >&2
    exit 1
fi
PATH="$(cd "$VENV" && pwd)/bin:$PATH"
# One BLAS thread per core of the task: more would oversubscribe, fewer would leave cores idle.
threads="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
export OMP_NUM_THREADS="$threads" OPENBLAS_NUM_THREADS="$threads" MKL_NUM_THREADS="$threads"
export OMP_PROC_BIND="${OMP_PROC_BIND:-true}" OMP_PLACES="${OMP_PLACES:-cores}"
export PYTHONUNBUFFERED=1 # ranks write to pipes: show lines at once
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # srun no longer takes it from sbatch

# A signal while Python starts would kill it; block it until there is a handler.
early=()
if [ "$(env --block-signal=USR1 echo yes 2>/dev/null)" = yes ]; then
    early=(env --block-signal=TERM,USR1,INT)
fi

# Starts "meshmpi ARGUMENTS" on all tasks of the job and waits for its end. Signals that arrive meanwhile
# are forwarded: the trainer finishes its step, saves and exits with status 75.
# Returns 0 only if every rank has reported that it finished, 69 if some have not: the exit statuses of
# mpirun and srun are not reliable.
run_meshmpi() {
    local told="" status
    [ "$1" = train ] || early=()
    case "${MESHMPI_LAUNCH:=mpirun}" in
    mpirun) # binds ranks to cores where it can; --ranks comes after the name of the command
        local name=$1
        shift
        set -- "${early[@]+"${early[@]}"}" python -m meshmpi "$name" --ranks "$SLURM_NTASKS" "$@"
        ;;
    pmix | pmi2) # with mpirun, our own launcher reads the ranks' reports
        told=$(mktemp -d "$PWD/.meshmpi-job-XXXXXXXX") || return 1
        local start
        start=$(python -c 'from meshmpi.launch import start; print(start.__file__)') || return 1
        set -- srun --mpi="$MESHMPI_LAUNCH" --cpu-bind=cores --kill-on-bad-exit=0 \
            --export="ALL,MESHMPI_OUTCOME=$told" \
            "${early[@]+"${early[@]}"}" python "$start" -m meshmpi "$@"
        ;;
    *) echo "MESHMPI_LAUNCH is '$MESHMPI_LAUNCH': use mpirun, pmix or pmi2" >&2 && return 2 ;;
    esac
    trap - USR1 TERM
    "$@" &
    wait_for $!
    status=$?
    if [ -n "$told" ]; then
        python -m meshmpi.guard.outcome "$told" "$SLURM_NTASKS" "$status"
        status=$?
        rm -rf "$told"
    fi
    return "$status"
}

# Waits for the end of process $1, forwards USR1 and TERM to it as USR1, and returns its status.
wait_for() {
    local child=$1 status
    trap 'kill -USR1 '"$child"' 2>/dev/null' USR1 TERM
    # A signal interrupts wait, so wait again until the job itself has ended.
    while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done
    if [ "$status" -gt 128 ]; then # the signal or the job?
        wait "$child"
        local last=$?
        [ "$last" -eq 127 ] || status=$last
    fi
    trap '' USR1 TERM # a second signal must not interrupt the rest
    return "$status"
}

# Prints --resume if this run has a checkpoint, else nothing.
resume_if_possible() {
    if compgen -G "$1/checkpoints/step-*/manifest.json" >/dev/null; then echo --resume; fi
}

# Trains CONFIG into the folder OUT with further ARGUMENTS, from the newest checkpoint on. Requeues the
# job if a signal or the time limit stopped it, or if it lost a rank or a node.
train_and_requeue() {
    local config=$1 out=${MESHMPI_OUT:-$2} status
    shift 2
    # shellcheck disable=SC2046  # nothing or one word
    run_meshmpi train "$config" --out "$out" $(resume_if_possible "$out") "$@"
    status=$?
    case "$status" in
    75) echo "stopped before its end; what there was to save is in $out" ;;
    69 | 137 | 139) # a rank or a node was lost, a rank killed, or it crashed
        echo "lost a rank or a node (exit status $status); what was saved is in $out"
        if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MESHMPI_MOST_RESTARTS:-5}" ]; then
            echo "it was requeued ${SLURM_RESTART_COUNT:-0} times before: given up"
            return "$status"
        fi
        ;;
    *) return "$status" ;;
    esac
    if [ "${MESHMPI_REQUEUE:-1}" = 1 ]; then
        echo "back into the queue"
        scontrol requeue "$SLURM_JOB_ID" # also in an array: each task has its own id
    fi
    return "$status"
}
