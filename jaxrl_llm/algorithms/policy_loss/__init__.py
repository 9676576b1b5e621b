"""Loss: ratios, clips and trust regions."""
