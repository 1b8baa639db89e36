"""Addresses: where to connect, and where to listen."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import urlsplit

from wire.errors import WireError

DEFAULT_PORTS = {"http": 80, "https": 443}
_ENDPOINT = re.compile(r"/v1(?:/(?:chat/)?completions|/responses|/messages)?\Z")


@dataclass(frozen=True)
class Origin:
    """A server: scheme, host and port, and the path that all its paths begin with."""

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @cached_property
    def host_header(self) -> bytes:
        """Value of the Host header: the port is left out where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header.decode()}{self.base_path}"

    def without_endpoint(self) -> "Origin":
        """Return the server whose paths begin with ``/v1``, for a URL that ends in it or in one of its endpoints."""
        return replace(self, base_path=_ENDPOINT.sub("", self.base_path))

    def target(self, path: str) -> bytes:
        return (self.base_path + path).encode("ascii")


def parse_url(text: str) -> Origin:
    """Read ``http[s]://host[:port][/base]``. Raises WireError that says what is wrong."""
    # No message repeats what stands before an @: it may be a password.
    shown = repr(text if "@" not in text else f"…@{text.rpartition('@')[2]}")
    malformed = WireError(f"{shown} is not a URL: expected http://HOST[:PORT] or https://HOST[:PORT]")
    try:
        parts = urlsplit(text)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError:
        raise malformed from None
    if parts.scheme not in DEFAULT_PORTS or not host:
        raise malformed
    if parts.username is not None:
        raise WireError(f"{shown}: a user in the URL; expected --header-env Authorization=VARIABLE")
    if parts.query or parts.fragment:
        raise WireError(f"{shown}: expected no query or fragment")
    if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
        raise WireError(f"{shown}: expected a path of ASCII without spaces; percent-encode the rest")
    return Origin(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/"))


def parse_listen(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` (``[::1]:8000`` for IPv6; port 0 lets the system choose). Raises WireError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise WireError(f"{text!r}: expected HOST:PORT, such as 127.0.0.1:8001")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or "0.0.0.0", int(port)
