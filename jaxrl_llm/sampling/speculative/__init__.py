"""Speculative decoding: drafts of earlier completions, verified in one pass."""
