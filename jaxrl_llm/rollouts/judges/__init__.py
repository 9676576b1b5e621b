"""Rollouts whose samples are judged by a language model."""
