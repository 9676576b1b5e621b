"""Whole runs in JAX: tasks, rollouts and training as one pure function."""
