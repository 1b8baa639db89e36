"""Conversion of request logs to traces with block hashes."""
