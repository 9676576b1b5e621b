"""Loss: regularisers, and references that move."""
