"""Heads of messages: their raw header lists, and what a hop must not pass on."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

Header = tuple[bytes, bytes]
Headers = Sequence[Header]

# RFC 9110, section 7.6.1: these, and whatever Connection names, concern one connection only. Transfer-Encoding is kept:
# bodies pass with their chunk framing unchanged, so the word that describes it passes too.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"})
KEPT_ALWAYS = frozenset({b"transfer-encoding", b"content-length", b"host"})


def header_values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of ``name`` (lower case), in order."""
    return [value for key, value in headers if key.lower() == name]


def connection_options(headers: Headers) -> frozenset[bytes]:
    """The lower-case words of every Connection header."""
    return _options(b",".join(header_values(headers, b"connection")))


def keeps_alive(version: str, headers: Headers, names: Sequence[bytes]) -> bool:
    """Return whether the sender of this head keeps the connection; ``names`` in lower case."""
    if b"connection" not in names:
        return version == "1.1"
    options = connection_options(headers)
    return b"close" not in options and (version == "1.1" or b"keep-alive" in options)


@lru_cache(maxsize=64)
def _options(values: bytes) -> frozenset[bytes]:
    return frozenset(word.strip().lower() for word in values.split(b",") if word.strip())


@lru_cache(maxsize=64)
def _dropped(connection: bytes) -> frozenset[bytes]:
    """Return the header names that do not pass a hop with these Connection headers."""
    return (HOP_BY_HOP | _options(connection)) - KEPT_ALWAYS


def end_to_end(headers: Headers, names: Sequence[bytes]) -> list[Header]:
    """Return the headers that pass a proxy, as they came; ``names``: their lower-case names, parallel to them."""
    if HOP_BY_HOP.isdisjoint(names):
        return list(headers)
    dropped = HOP_BY_HOP
    if b"connection" in names:
        dropped = _dropped(b",".join(header_values(headers, b"connection")))
    return [header for header, name in zip(headers, names, strict=True) if name not in dropped]


def serialise_head(start_line: bytes, headers: Iterable[Header]) -> bytes:
    """A message's head, its empty line included."""
    return b"\r\n".join((start_line, *map(b": ".join, headers), b"\r\n"))
