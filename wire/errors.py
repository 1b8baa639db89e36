"""Errors of addresses and connections, and the outcomes of an exchange."""

from typing import Literal


class WireError(Exception):
    """Invalid address or unreachable server; the message is one line for the user."""


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
"""Reason for a failed exchange: no connection, closed by the server, invalid or oversized response, end of the run."""

Outcome = Literal["ok", "client_abort", "upstream_abort", "timeout", "error"]
"""Outcome of an exchange. ok: a complete response of any status. error: no connection, or not HTTP."""
