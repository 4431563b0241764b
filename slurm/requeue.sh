# For the job scripts beside this file: run_and_requeue COMMAND... runs it and ends the job's script.
#
# Slurm sends the script USR1 some time before the job's time is over (#SBATCH --signal=B:USR1@SECONDS). The script
# passes it on to the command, an srun or a program, which saves and ends. Ends:
#
#   0      done
#   75     saved, unfinished: the job goes back into the queue and goes on from there, MAX_RESTARTS times at most
#   other  failed: the job ends as FAILED and is not started again, as it would fail for ever; see its log
#
# SIGNAL says what the command gets for USR1. RETRY is a further status that counts as unfinished where a signal came,
# for programs that keep what is finished and simply end.

run_and_requeue() {
    local status interrupted signalled=
    trap 'interrupted=1; kill -s "${SIGNAL:-USR1}" "$command" 2>/dev/null' USR1
    # TERM, before Slurm takes the nodes away, comes to all processes by itself; one more would make srun kill its own.
    trap 'interrupted=1' TERM
    "$@" &  # in the background: bash runs no trap while it waits for a program in the foreground
    command=$!
    while interrupted=; wait "$command"; status=$?; [ -n "$interrupted" ]; do
        signalled=1  # and wait again: it ended because of a trap, with a status of its own
    done
    if [ "$status" = 75 ] || { [ -n "$signalled" ] && [ "$status" = "${RETRY:-75}" ]; }; then
        local restarts=${SLURM_RESTART_COUNT:-0}
        if [ "$restarts" -lt "${MAX_RESTARTS:-1000}" ]; then
            echo "$(date '+%F %T'): job $SLURM_JOB_ID is not done and goes back into the queue, restart $((restarts + 1))"
            scontrol requeue "$SLURM_JOB_ID"  # last of all, for Slurm ends this script at once
        else
            echo "job $SLURM_JOB_ID is not done after $restarts restarts, which is MAX_RESTARTS"
        fi
    fi
    exit "$status"
}

# The project's environment, if it is there (`make .venv/installed`), else the machine's Python; or set PYTHON.
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun, since Slurm 22.05, does not take it from the job
