"""Measurements of the simulator benchmark."""
