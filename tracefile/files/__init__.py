"""Traces read and written, whatever their format, and their digests."""
