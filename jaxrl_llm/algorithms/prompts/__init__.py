"""Prompts: which, and how many samples of each."""
