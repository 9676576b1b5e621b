"""Clip ranges that adapt to the batch or to the token."""
