"""Evaluation of a run: held-out prompts that the policy answers, and held-out responses that it is given."""
