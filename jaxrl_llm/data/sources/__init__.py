"""Rows from files, shards and the Hugging Face hub."""
