"""Passes over whole traces: summary, check, anonymity."""
