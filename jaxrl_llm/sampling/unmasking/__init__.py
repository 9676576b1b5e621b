"""Sampling from masked-diffusion models: tokens take the place of masks, block after block."""
