"""Passes over whole traces: summary, check, sharing, synthesis."""
