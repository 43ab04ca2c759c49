#!/bin/bash
#SBATCH --job-name=train-lm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120 # to the processes, two minutes before the end: they save
# A process for each GPU. A lost node, or the end of the time, puts the job back into the queue; it goes on from its checkpoint.

srun --kill-on-bad-exit=0 \
    python examples/train_lm.py --checkpoint "$SLURM_SUBMIT_DIR/runs/a" --layout fsdp --batch 256
status=$?

case $status in
    0) ;;
    1 | 2) exit "$status" ;;               # the script failed; its mesh or layout cannot be
    *) scontrol requeue "$SLURM_JOB_ID" ;; # 75: a process was lost, or all saved because the time is over; 137: one was killed
esac
