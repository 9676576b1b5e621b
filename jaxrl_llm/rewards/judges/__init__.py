"""Judges: questions about responses, what answers to them say, and endpoints that answer."""
