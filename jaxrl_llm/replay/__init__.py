"""Replay: what of earlier steps joins the batch of a step."""
