"""Losses that bring a student to its teacher."""
