"""Answers and code blocks in completions, read and compared."""
