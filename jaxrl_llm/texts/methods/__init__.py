"""Optimise a text with the policy itself, without changing its weights: jaxrl texts METHOD."""
