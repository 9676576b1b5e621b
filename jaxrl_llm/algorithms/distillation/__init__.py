"""Losses from a teacher's distributions, of tokens that the policy sampled."""
