"""Replay of a captured trace: its prefix sharing, lengths and times, with tokens generated from block hashes."""
