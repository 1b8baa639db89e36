"""TLS client contexts from certificate files, reloaded when the files change."""

import os
import ssl
from functools import lru_cache

import msgspec

from wire.errors import WireError

ALPN = ["http/1.1"]


class Tls(msgspec.Struct, frozen=True):
    """Certificate files of a TLS client. None: the system's authorities, no client certificate."""

    ca: str | None = None
    """Certificates of further trusted authorities."""
    cert: str | None = None
    """Certificate chain of the client."""
    key: str | None = None
    """Key of ``cert``. None: in the same file."""


SYSTEM_TLS = Tls()


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that verifies certificate and host name; raises WireError naming an invalid file."""
    variables = tuple(os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return _client_context(tls, variables, tuple(map(_changed_ns, (tls.ca, tls.cert, tls.key, *variables))))


@lru_cache(maxsize=8)
def _client_context(
    tls: Tls, variables: tuple[str | None, ...], changed_ns: tuple[int | None, ...]
) -> ssl.SSLContext:  # loading the authorities takes 20 ms
    if variables[0] and not os.path.isfile(variables[0]):
        raise WireError(f"SSL_CERT_FILE={variables[0]}: not there; expected a file of PEM certificates")
    context = ssl.create_default_context()
    context.set_alpn_protocols(ALPN)
    if tls.key is not None and tls.cert is None:
        raise WireError(f"--key {tls.key}: without --cert; expected both, or neither")
    for flag, path in (("--cert", tls.cert), ("--key", tls.key)):
        if path is not None and not os.access(path, os.R_OK):
            raise WireError(f"{flag} {path}: cannot be read; expected a PEM file")
    where, expected = f"--ca {tls.ca}", "a file of PEM certificates"
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        where = f"--cert {tls.cert}" if tls.key is None else f"--cert and --key {tls.cert}, {tls.key}"
        expected = "a PEM certificate and its unlocked key"
        if tls.cert is not None:  # without a password here, OpenSSL would ask the terminal for one
            context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except OSError as error:
        tls_reason = (getattr(error, "reason", None) or "not PEM").lower().replace("_", " ")
        reason = tls_reason if isinstance(error, ssl.SSLError) else error.strerror
        raise WireError(f"{where}: {reason}; expected {expected}") from None
    return context


def _changed_ns(path: str | None) -> int | None:
    try:
        return None if path is None else os.stat(path).st_mtime_ns
    except OSError:
        return None
