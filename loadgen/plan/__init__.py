"""The load as drawn from its seed: arrivals, lengths, conversations, prompts."""
