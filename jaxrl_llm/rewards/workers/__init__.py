"""Reward functions in processes of their own, with time limits."""
