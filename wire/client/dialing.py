"""A way to a server: a handshake, a tunnel through a proxy, and the step that failed, in words."""

import asyncio
import errno
import socket
import ssl
from typing import NamedTuple

from wire.client.proxies import Proxy, ProxyError
from wire.errors import LossKind
from wire.head import serialise_head
from wire.url import Origin

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


class Failure(NamedTuple):
    """Failed step on the way to a server."""

    kind: LossKind
    reason: str
    """The step, and what was expected."""


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
