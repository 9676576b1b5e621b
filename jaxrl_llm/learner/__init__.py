"""The learner: what a method needs, packing, gradient steps, the optimiser."""
