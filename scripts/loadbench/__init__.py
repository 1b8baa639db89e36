"""Clients and runs of the loadgen benchmark."""
