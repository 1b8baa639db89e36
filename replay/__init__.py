"""A captured trace as load: its sharing, lengths and times, with tokens made from its hashes."""
