"""Synthetic load: prompts, arrivals and API of requests, and the sender that replay uses, too."""
