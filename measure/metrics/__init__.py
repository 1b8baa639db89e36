"""Metrics of a run: latency, throughput and prefix hits by request, session and workload; health checks; SLOs."""
