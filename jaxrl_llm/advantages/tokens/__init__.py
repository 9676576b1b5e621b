"""Credit of single tokens: baselines, rewards and windows."""
