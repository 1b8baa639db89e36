"""Parsers of server URLs and listening addresses."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import urlsplit

from wire.errors import WireError

DEFAULT_PORTS = {"http": 80, "https": 443}
_ENDPOINT = re.compile(r"/v1(?:/(?:chat/)?completions|/responses|/messages)?\Z")


@dataclass(frozen=True)
class Origin:
    """A server: scheme, host, port and path prefix."""

    scheme: str
    host: str
    port: int
    base_path: str = ""

    @cached_property
    def host_header(self) -> bytes:
        """Value of the Host header, without the scheme's default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header.decode()}{self.base_path}"

    def without_endpoint(self) -> "Origin":
        """Return the origin without a trailing ``/v1`` or completion endpoint in its path."""
        return replace(self, base_path=_ENDPOINT.sub("", self.base_path))

    def target(self, path: str) -> bytes:
        return (self.base_path + path).encode("ascii")


def parse_url(text: str) -> Origin:
    """Parse ``http[s]://host[:port][/base]``. Raises WireError with the reason."""
    # No message repeats text before an @, which may be a password.
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
        raise WireError(f"{shown}: expected a path of ASCII without spaces; percent-encode other characters")
    return Origin(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], parts.path.rstrip("/"))


def parse_listen(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT`` (``[::1]:8000`` for IPv6; port 0: chosen by the system). Raises WireError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise WireError(f"{text!r}: expected HOST:PORT, such as 127.0.0.1:8001")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host or "0.0.0.0", int(port)
