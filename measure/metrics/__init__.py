"""Metrics of one run, each defined once: of requests, sessions, the workload, its hits; health checks and SLOs."""
