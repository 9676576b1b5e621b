"""Loss: preferences between samples of a prompt."""
