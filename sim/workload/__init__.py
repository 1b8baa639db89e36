"""Requests of a trace as the simulator takes them: chains of block keys, arrivals, sessions."""
