"""Environments: where prompts come from and what answers are worth."""
