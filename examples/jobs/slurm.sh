#!/bin/bash
# A training on 4 nodes with 8 GPUs each. Two minutes before the time limit Slurm sends SIGTERM:
# the run saves, and the job goes back into the queue. So it does when a host is lost.
#SBATCH --job-name=mt --nodes=4 --ntasks-per-node=8 --gpus-per-task=1
#SBATCH --time=12:00:00 --requeue --signal=TERM@120 --open-mode=append

srun --kill-on-bad-exit=1 gshard train base --corpus corpus --out runs/base
status=$?
# A status of 1 is an error that somebody has to mend; any other is a signal or a lost host.
if [ $status -ne 0 ] && [ $status -ne 1 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
