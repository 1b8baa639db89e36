"""Errors of addresses and connections, and the names of an exchange's ends."""

from typing import Literal


class WireError(Exception):
    """Malformed address, or unreachable server; one line for the user."""


LossKind = Literal[
    "connect_refused",
    "connect_timeout",
    "connect_failed",
    "tls_failed",
    "upstream_closed",
    "bad_response",
    "response_too_large",
    "timeout",
    "deadline",
]
"""Reason for a lost exchange: no connection, a close by the server, a bad or overlong response, a run's end."""

Outcome = Literal["ok", "client_abort", "upstream_abort", "timeout", "error"]
"""End of an exchange. ok: a whole response, whatever its status. error: no connection, or not HTTP."""
