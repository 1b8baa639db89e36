"""The data plane: a worker relays requests and keeps side copies."""
