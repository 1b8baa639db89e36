"""Forecasts: ensembles, validation, scenarios, search."""
