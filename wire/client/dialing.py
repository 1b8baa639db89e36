"""Error messages for failed connections: DNS, TCP or TLS."""

import asyncio
import errno
import socket
import ssl

from wire.errors import LossKind
from wire.url import Origin

REFUSED_CERTIFICATES = {
    **dict.fromkeys((2, 18, 19, 20, 21), "is of an unknown authority; expected --ca FILE with its certificate"),
    9: "is not valid yet; expected a valid one, and a right clock here",
    10: "has expired; expected a valid one",
    **dict.fromkeys((62, 64), "is for another host; expected the host name that it was issued for"),
}
"""Messages by OpenSSL's certificate error (X509_V_ERR_…)."""
NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
"""OpenSSL's reasons for a peer without TLS."""


def failure(error: OSError, origin: Origin, timeout_s: float) -> tuple[LossKind, str]:
    """Return the kind of a connection failure and its message with the expectation."""
    secure = origin.scheme == "https"
    if isinstance(error, ssl.SSLError) or (secure and isinstance(error, ConnectionResetError | ConnectionAbortedError)):
        return "tls_failed", f"TLS: {_handshake_failure(error)}"
    if isinstance(error, TimeoutError):
        expected = "a TLS port" if secure else "a reachable address"
        return "connect_timeout", f"no connection within {timeout_s:g} s; expected {expected}"
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "connect_refused", f"connection refused; expected a server on port {origin.port}"
    if isinstance(error, socket.gaierror):
        return "connect_failed", f"the host name {origin.host} does not resolve; expected a known one"
    reason = error.strerror or type(error).__name__
    return "connect_failed", f"no connection ({reason}); expected a reachable address"


def _handshake_failure(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        refused = f"was refused ({error.verify_message}); expected a valid one"
        return f"the certificate {REFUSED_CERTIFICATES.get(error.verify_code, refused)}"
    if not isinstance(error, ssl.SSLError):
        return "the server closed the connection within the handshake; expected a TLS port"
    if error.reason in NO_TLS:
        return "the port has no TLS; expected http:// instead of https://, or another port"
    reason = (error.reason or "no handshake").lower().replace("_", " ")
    return f"the handshake failed ({reason}); expected a compatible server, or --cert and --key"


async def speaks_tls(origin: Origin, timeout_s: float) -> bool:
    """Return whether the port completes a TLS handshake, with any certificate; for failed http:// calls."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(origin.host, origin.port, ssl=context)
    except OSError:
        return False
    writer.transport.abort()
    return True
