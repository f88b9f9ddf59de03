#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}#SBATCH --exclusive
#SBATCH --signal=B:TERM@{seconds}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

# Slurm signals this shell before the time is up. The run saves and ends with {saved}, and the job is queued again.
mkdir -p logs
if [ -f {env_file} ]; then set -a; . ./{env_file}; set +a; fi
# The processes of the run authenticate with it. srun passes it in their environment, which nobody else can read.
export TORUS_RUN_SECRET="${{TORUS_RUN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -dc 0-9a-f)}}"
signalled=0
trap 'signalled=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM  # not srun, which would allow 30 s
srun --kill-on-bad-exit=0 bash -c {worker} &
step=$!
wait "$step"
status=$?
if [ "$signalled" -eq 1 ]; then  # the signal ended `wait`, not the step
    wait "$step"
    status=$?
fi
if [ "$status" -eq {saved} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
