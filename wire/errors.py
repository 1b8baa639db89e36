"""What can be wrong with an address, and the names of what can go wrong on a connection."""

from typing import Literal


class WireError(Exception):
    """An address that is none, or a server that cannot be reached; one line for the user."""


LossKind = Literal[
    "connect_refused", "connect_timeout", "connect_failed", "tls_failed", "upstream_closed", "bad_response", "timeout"
]
"""How an exchange was lost: before a connection was there, by the server closing it, or by what it sent."""
