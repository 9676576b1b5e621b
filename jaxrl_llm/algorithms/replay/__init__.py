"""Replay: completions of earlier steps, or of other policies."""
