"""Latency forecasts compared with captures of real engines."""
