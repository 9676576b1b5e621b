"""Evolution strategies: updates from what members with perturbed weights earn, without backpropagation."""
