"""Runs: the host loop, its configuration, checkpoints, evaluation and folder."""
