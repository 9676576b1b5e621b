"""The folder of a run: files, checkpoints, locks, provenance and what may change on resume."""
