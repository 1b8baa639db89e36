"""Requests, plans, jobs and random draws of tokens, shared by loadgen and replay."""
