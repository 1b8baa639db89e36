"""Clients and proxies of the tap benchmark: added latency, throughput."""
