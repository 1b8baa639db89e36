"""Prompt token ids from the best available source, and their block hashes."""
