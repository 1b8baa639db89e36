"""Chained block hashes, their key, and coarser block sizes."""
