"""Supervisor: starts, restarts and drains the processes of the tap, and accounts for every request."""
