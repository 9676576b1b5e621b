"""Rollouts: completions made with hints, prefixes, other policies and second questions."""
