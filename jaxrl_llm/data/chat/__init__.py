"""Conversations as tokens: chat templates, turns, and calls of tools."""
