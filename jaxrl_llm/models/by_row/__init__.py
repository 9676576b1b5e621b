"""Weights that differ from row to row of a batch: stacked adapters, and members of a population."""
