"""Several processes: how they start, agree, watch each other, read data and keep checkpoints."""
