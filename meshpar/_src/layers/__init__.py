"""What models call: attention, mixtures of experts, microbatches, precision, checkpoint policies."""
