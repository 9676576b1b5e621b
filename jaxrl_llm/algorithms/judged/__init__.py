"""Judges: rewards by verdicts of language models and constraints."""
