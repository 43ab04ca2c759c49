"""Functions of a plan: FLOPs, fusion, memory, seconds."""
