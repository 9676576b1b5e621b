"""Reward models as reward functions: whole completions or their steps, scored in batches on a run's devices."""
