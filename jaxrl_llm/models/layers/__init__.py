"""Layers of the decoder: attention, states, MLPs and experts, and what they are made of."""
