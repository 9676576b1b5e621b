"""Rollouts: how groups of episodes come to be."""
