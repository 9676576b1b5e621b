"""Training runs: the host loop, its configuration, set-up, metrics, checkpoints, evaluation and folder."""
