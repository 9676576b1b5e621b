"""An OpenAI-compatible endpoint over the engine: `jaxrl serve`."""
