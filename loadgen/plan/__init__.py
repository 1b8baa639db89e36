"""The load as drawn from its seed: arrivals, token lengths, conversations, prompts."""
