"""Training: the update, the host loop over it, checkpoints, evaluation."""
