"""Admin port of the tap: health, readiness and Prometheus metrics."""
