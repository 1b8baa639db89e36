"""Passes over complete traces: summary, check, anonymity."""
