"""Loss: preferences between samples of a prompt, drawn as the run goes on."""
