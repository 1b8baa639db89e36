"""Requests of a trace for the simulator: block keys, arrivals, sessions."""
