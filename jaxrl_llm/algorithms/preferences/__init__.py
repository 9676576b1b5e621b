"""Loss: preferences between samples of a prompt, or between given responses."""
