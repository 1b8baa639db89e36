"""Forecasts held to captures of a real vLLM."""
