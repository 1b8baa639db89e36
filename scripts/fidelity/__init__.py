"""Forecasts compared with captures of real engines."""
