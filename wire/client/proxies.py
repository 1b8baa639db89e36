"""HTTP proxies by the environment, as curl takes them."""

import base64
import os
import re
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from wire.head import Header
from wire.url import Origin


class ProxyError(OSError):
    """The proxy cannot be used, or opens no tunnel; the text is the reason."""


class Proxy(NamedTuple):
    """An HTTP proxy: it forwards requests to http servers, and opens tunnels to https servers."""

    host: str
    port: int
    headers: tuple[Header, ...]
    """The proxy's user and password; empty: none."""
    variable: str

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port} of {self.variable}"


def proxy_of(origin: Origin) -> Proxy | None:
    """Return the server's proxy by HTTP_PROXY, HTTPS_PROXY and NO_PROXY; none for this machine's own addresses.

    Raises ProxyError for a proxy that is no URL.
    """
    variable = f"{origin.scheme.upper()}_PROXY"
    if not any(map(os.environ.get, (variable, variable.lower()))) or _is_this_machine(origin.host):
        return None
    # Slow to import, and only needed behind a proxy.
    from urllib.request import getproxies_environment, proxy_bypass  # noqa: PLC0415

    proxies = getproxies_environment()
    if origin.scheme not in proxies or proxy_bypass(f"{origin.host}:{origin.port}", proxies):
        return None
    text = proxies[origin.scheme]
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or not host:
        raise ProxyError(f"{variable}: cannot be used; expected http://HOST:PORT")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    authorization = (b"Proxy-Authorization", b"Basic " + base64.b64encode(user))
    return Proxy(host, port or 80, () if user == b":" else (authorization,), variable)


def _is_this_machine(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127\.\d+\.\d+\.\d+", host) is not None


def forwarding(origin: Origin) -> tuple[bytes, tuple[Header, ...]]:
    """Return the beginning of every request's target, and its further headers: for a proxy that forwards it."""
    try:
        proxy = proxy_of(origin) if origin.scheme == "http" else None
    except ProxyError:  # no connection is made, and that says why
        proxy = None
    return (b"", ()) if proxy is None else (b"http://" + origin.host_header, proxy.headers)
