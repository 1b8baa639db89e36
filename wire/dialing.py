"""A way to a server: TLS by its files, a proxy by the environment, and the step that failed, in words."""

import asyncio
import base64
import errno
import os
import re
import socket
import ssl
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from wire.errors import LossKind, WireError
from wire.head import Header, serialise_head
from wire.url import Origin

ALPN = ["http/1.1"]
MAX_PROXY_HEAD_BYTES = 16 << 10
REFUSED_CERTIFICATES = {
    **dict.fromkeys((2, 18, 19, 20, 21), "is of an unknown authority; expected --ca FILE with its certificate"),
    9: "is not valid yet; expected a valid one, and a right clock here",
    10: "has expired; expected a valid one",
    **dict.fromkeys((62, 64), "is for another host; expected the host name that it was issued for"),
}
"""Failed checks by OpenSSL's codes, X509_V_ERR_…"""
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
"""OpenSSL's reasons for bytes that are no TLS."""


class Tls(msgspec.Struct, frozen=True):
    """Files of a TLS client, read again when they change; null: the system's authorities, no client certificate."""

    ca: str | None = None
    """Certificates of authorities to trust beside the system's."""
    cert: str | None = None
    """Chain of the client's certificate."""
    key: str | None = None
    """Key of ``cert``. Null: in the same file."""


SYSTEM_TLS = Tls()


class Failure(NamedTuple):
    """Failed step on the way to a server."""

    kind: LossKind
    reason: str
    """The step, and what was expected."""


class ProxyError(OSError):
    """The proxy cannot be used, or opens no tunnel; the text is the reason."""


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that checks certificate and host name; raises WireError naming the file that is wrong."""
    own = tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return _client_context(tls, own, tuple(map(_changed_ns, (tls.ca, tls.cert, tls.key, *own))))


@lru_cache(maxsize=8)
def _client_context(
    tls: Tls, own: tuple[str | None, ...], changed_ns: tuple[int | None, ...]
) -> ssl.SSLContext:  # reading the authorities takes 20 ms
    if own[0] and not os.path.isfile(own[0]):
        raise WireError(f"SSL_CERT_FILE={own[0]}: not there; expected a file of PEM certificates")
    context = ssl.create_default_context()
    context.set_alpn_protocols(ALPN)
    if tls.ca is not None:
        try:
            context.load_verify_locations(tls.ca)
        except (OSError, ssl.SSLError) as error:
            raise WireError(f"--ca {tls.ca}: {_unread(error)}; expected a file of PEM certificates") from None
    if tls.cert is not None:
        _load_chain(context, tls.cert, tls.key, ("--cert", "--key"))
    elif tls.key is not None:
        raise WireError(f"--key {tls.key}: without --cert; expected both, or neither")
    return context


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """Return a server's context; raises WireError naming the file that is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(ALPN)
    reload_chain(context, cert, key)
    return context


def reload_chain(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Use the files as they are now for connections to come; raises WireError, and then nothing has changed."""
    _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert, key, ("--tls-cert", "--tls-key"))
    _load_chain(context, cert, key, ("--tls-cert", "--tls-key"))


def _load_chain(context: ssl.SSLContext, cert: str, key: str | None, flags: tuple[str, str]) -> None:
    for flag, path in zip(flags, (cert, key), strict=True):
        if path is not None and not os.access(path, os.R_OK):
            raise WireError(f"{flag} {path}: cannot be read; expected a PEM file")
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        flag, path = (flags[0], cert) if key is None else (" and ".join(flags), f"{cert}, {key}")
        raise WireError(f"{flag} {path}: {_unread(error)}; expected a PEM certificate and its unlocked key") from None


def _no_password() -> str:
    """Return no password: OpenSSL would else ask the terminal for one."""
    return ""


def _unread(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or "cannot be read"
    return (error.reason or "not PEM").lower().replace("_", " ")


def _changed_ns(path: str | None) -> int | None:
    try:
        return None if path is None else os.stat(path).st_mtime_ns
    except OSError:
        return None


def failure(error: OSError, origin: Origin, timeout_s: float) -> Failure:
    """Return the step that failed on the way to ``origin``."""
    secure = origin.scheme == "https"
    if isinstance(error, ssl.SSLError) or (secure and isinstance(error, ConnectionResetError | ConnectionAbortedError)):
        return Failure("tls_failed", f"TLS: {_handshake_failure(error)}")
    if isinstance(error, TimeoutError):
        awaited = "a port that speaks TLS" if secure else "a reachable address"
        return Failure("connect_timeout", f"no connection within {timeout_s:g} s; expected {awaited}")
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return Failure("connect_refused", f"connection refused; expected a server on port {origin.port}")
    if isinstance(error, ProxyError):
        return Failure("connect_failed", str(error))
    if isinstance(error, socket.gaierror):
        return Failure("connect_failed", f"the host name {origin.host} does not resolve; expected a known one")
    reason = error.strerror or type(error).__name__
    return Failure("connect_failed", f"no connection ({reason}); expected a reachable address")


def _handshake_failure(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        refused = f"was refused ({error.verify_message}); expected a valid one"
        return f"the certificate {REFUSED_CERTIFICATES.get(error.verify_code, refused)}"
    if not isinstance(error, ssl.SSLError):
        return "the server closed the connection within the handshake; expected a port that speaks TLS"
    if error.reason in NO_TLS:
        return "the port does not speak it; expected http:// instead of https://, or another port"
    reason = (error.reason or "no handshake").lower().replace("_", " ")
    return f"the handshake failed ({reason}); expected a server that takes ours, or --cert and --key"


async def speaks_tls(origin: Origin, timeout_s: float) -> bool:
    """Return whether the port makes a TLS handshake, of whatever certificate: after an http:// call that failed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
    except OSError:
        return False
    writer.transport.abort()
    return True


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


async def reach_proxy(proxy: Proxy, origin: Origin) -> socket.socket:
    """Return a socket to ``proxy``, behind it a tunnel if ``origin`` is https; raises ProxyError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(proxy.host, proxy.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError:
        raise ProxyError(f"{proxy} does not resolve; expected a known host") from None
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        if origin.scheme == "https":
            await _open_tunnel(sock, proxy, origin)
    except ProxyError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ProxyError(f"{proxy} cannot be used ({error.strerror or 'closed'}); expected an HTTP proxy") from None
    except BaseException:
        sock.close()
        raise
    return sock


async def _open_tunnel(sock: socket.socket, proxy: Proxy, origin: Origin) -> None:
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    target = f"{host}:{origin.port}".encode()
    head = serialise_head(b"CONNECT %b HTTP/1.1" % target, ((b"Host", target), *proxy.headers))
    await asyncio.get_running_loop().sock_sendall(sock, head)
    status = await _tunnel_status(sock)
    if status != b"200":
        raise ProxyError(f"{proxy} opens no tunnel (HTTP {status.decode()}); expected one to {target.decode()}")


async def _tunnel_status(sock: socket.socket) -> bytes:
    """Return the status of a CONNECT; nothing follows its head until the client speaks."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = await asyncio.get_running_loop().sock_recv(sock, MAX_PROXY_HEAD_BYTES)
        head += piece
        if not piece or len(head) > MAX_PROXY_HEAD_BYTES:
            raise OSError(errno.EPROTO, "not HTTP")
    version, _, rest = head.partition(b" ")
    status = rest[:3]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise OSError(errno.EPROTO, "not HTTP")
    return status
