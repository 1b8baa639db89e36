"""One read of a response body: when it came and what it held."""

from typing import NamedTuple


class BodyRead(NamedTuple):
    """De-chunked bytes of one read from the socket, with the time taken first thing when it arrived."""

    at_ns: int
    """``time.perf_counter_ns()``."""
    data: bytes
