"""Agents: episodes of several turns with an environment."""
