"""Rollouts with hints, given prefixes, repaired groups and other policies."""
