"""Bytes of trace files: lines, compression, appending, mending, segments."""
