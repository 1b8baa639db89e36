"""Clients and runs of the loadgen benchmark: errors of measured latencies, throughput."""
