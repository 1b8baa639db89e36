"""TLS of clients, by its files, which are read again when they change."""

import os
import ssl
from functools import lru_cache

import msgspec

from wire.errors import WireError

ALPN = ["http/1.1"]


class Tls(msgspec.Struct, frozen=True):
    """Files of a TLS client, read again when they change; null: the system's authorities, no client certificate."""

    ca: str | None = None
    """Certificates of authorities to trust beside the system's."""
    cert: str | None = None
    """Chain of the client's certificate."""
    key: str | None = None
    """Key of ``cert``. Null: in the same file."""


SYSTEM_TLS = Tls()


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
        _load_chain(context, tls.cert, tls.key)
    elif tls.key is not None:
        raise WireError(f"--key {tls.key}: without --cert; expected both, or neither")
    return context


def _load_chain(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    for flag, path in (("--cert", cert), ("--key", key)):
        if path is not None and not os.access(path, os.R_OK):
            raise WireError(f"{flag} {path}: cannot be read; expected a PEM file")
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        flag, path = ("--cert", cert) if key is None else ("--cert and --key", f"{cert}, {key}")
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
