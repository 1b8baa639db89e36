"""Where a run sends to."""

from tracefile import InputError
from wire.errors import WireError
from wire.url import Origin, parse_url


def origin_of(url: str) -> Origin:
    """Where a ``--url`` points; raises InputError."""
    try:
        return parse_url(url.rstrip("/").removesuffix("/v1"))
    except WireError as error:
        raise InputError(f"--url: {error}") from None
