"""Requests, plans, jobs and draws: shared by loadgen and replay."""
