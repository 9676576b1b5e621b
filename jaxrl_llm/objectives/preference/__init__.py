"""Losses on pairs and lists of samples."""
