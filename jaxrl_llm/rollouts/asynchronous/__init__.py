"""Sampling beside updates: the source, its sampler in a thread, the bound on staleness, and the order of a run."""
