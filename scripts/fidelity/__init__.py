"""Forecasts held to captures of real engines."""
