"""Addresses: where to connect, and where to listen."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from urllib.parse import urlsplit

from wire.errors import WireError

DEFAULT_PORTS = {"http": 80, "https": 443}
_ENDPOINT = re.compile(r"/v1(?:/(?:chat/)?completions|/responses|/messages)?")


@dataclass(frozen=True, slots=True)
class Origin:
    """A server: scheme, host and port, and the path that all its paths begin with."""

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @property
    def host_header(self) -> bytes:
        """Value of the Host header: the port is left out where it is the scheme's own."""
        return _host_header(self)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header.decode()}{self.base_path}"

    def without_endpoint(self) -> "Origin":
        """Return the server whose paths begin with ``/v1``, for a URL that ends in it or in one of its endpoints."""
        before, slash, rest = self.base_path.rpartition("/v1")
        return replace(self, base_path=before) if slash and _ENDPOINT.fullmatch(slash + rest) else self

    def target(self, path: str) -> bytes:
        return (self.base_path + path).encode("ascii")


@lru_cache(maxsize=256)
def _host_header(origin: Origin) -> bytes:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return (host if origin.port == DEFAULT_PORTS[origin.scheme] else f"{host}:{origin.port}").encode("ascii")


def parse_url(text: str) -> Origin:
    """Read ``http[s]://host[:port][/base]``. Raises WireError that says what is wrong."""
    # No message repeats what stands before an @: it may be a password.
    shown = repr(text if "@" not in text else f"…@{text.rpartition('@')[2]}")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise WireError(f"{shown} is not a URL: expected http://HOST[:PORT] or https://HOST[:PORT]") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise WireError(f"{shown} is not a URL: expected http://HOST[:PORT] or https://HOST[:PORT]")
    try:
        port = parts.port
    except ValueError:
        raise WireError(f"{shown}: the port is not a number from 0 to 65535") from None
    if not parts.hostname:
        raise WireError(f"{shown} names no host")
    if parts.username is not None:
        raise WireError(f"{shown}: a user in the URL; expected --header-env Authorization=VARIABLE")
    if parts.query or parts.fragment:
        raise WireError(f"{shown}: expected no query or fragment")
    if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
        raise WireError(f"{shown}: expected a path of ASCII without spaces; percent-encode the rest")
    try:
        host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else parts.hostname
    except UnicodeError:
        raise WireError(f"{shown}: the host name is not valid") from None
    return Origin(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/"))


def parse_listen(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` (``[::1]:8000`` for IPv6; port 0 lets the system choose). Raises WireError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise WireError(f"{text!r}: expected HOST:PORT, such as 127.0.0.1:8001")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or "0.0.0.0", int(port)
