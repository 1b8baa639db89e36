"""Measurements of the simulator benchmark: scheduler steps and requests per second."""
