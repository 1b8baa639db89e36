"""Flags of the sim commands that forecast; each ``run`` imports its command's work."""
