"""Rewards: shaped, combined or composed."""
