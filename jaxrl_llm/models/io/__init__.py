"""Load and save models: Hugging Face folders and GGUF files."""
