"""Masked-diffusion models: what they see of a batch, and bounds on likelihoods."""
