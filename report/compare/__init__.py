"""Traces side by side: cells, cohorts, gates, verdicts, tables."""
