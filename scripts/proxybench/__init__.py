"""Clients and proxies of the tap benchmark."""
