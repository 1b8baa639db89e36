"""Token ids of a prompt by the best source, and their block hashes."""
