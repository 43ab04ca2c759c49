#!/bin/bash
#SBATCH --job-name=train-lm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# One process for each GPU of 4x h100:8. Two minutes before the time limit they receive SIGTERM,
# and save. After that, or after a loss, the job is queued again, and continues.

srun --kill-on-bad-exit=0 python examples/train_lm.py --checkpoint runs/a --layout fsdp --batch 256
status=$?

case $status in
    0) ;;
    # a process was lost, or all have saved; or one was ended by a signal
    75 | 12[89] | 1[3-9]?) scontrol requeue "$SLURM_JOB_ID" ;;
    *) exit "$status" ;; # the script failed, or its mesh or layout is invalid
esac
