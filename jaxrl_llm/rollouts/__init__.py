"""Rollouts: programs that sample groups of episodes, and the driver that runs them."""
