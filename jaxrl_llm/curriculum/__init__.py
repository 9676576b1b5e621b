"""Curricula: what is known of each prompt, and which prompts and how many samples come next."""
