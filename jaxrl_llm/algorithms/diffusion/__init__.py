"""Loss: of masked-diffusion language models, whose likelihoods are bounded by samples."""
