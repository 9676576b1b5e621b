"""Errors, JSON, storage, processes, threads and settings: what every package may use."""
