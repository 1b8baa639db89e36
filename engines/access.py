"""Access to an engine behind a door: keys, headers and TLS files, from one set of flags for every command."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence

import msgspec

from tracefile.records.errors import InputError
from wire.dialing import SYSTEM_TLS, Tls, client_context
from wire.errors import WireError
from wire.head import Header

OPENAI_KEY, ANTHROPIC_KEY = "OPENAI_API_KEY", "ANTHROPIC_API_KEY"
REFUSED = frozenset({401, 403})
"""HTTP statuses for a missing or wrong key."""

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
SECRET_HEADER = re.compile(r"authorization|cookie|key|token|secret|password|credential|signature", re.IGNORECASE)
OWN_HEADERS = frozenset(
    {
        *("host", "content-length", "content-type", "transfer-encoding", "connection", "keep-alive", "te", "trailer"),
        *("upgrade", "expect", "accept", "accept-encoding", "proxy-connection", "x-request-id"),
    }
)
"""Headers that every request has already, or that would change its framing."""


class Access(msgspec.Struct, frozen=True, array_like=True):
    """Headers and TLS of every request to an engine. Values of headers are secrets: in no file, text or argument."""

    headers: tuple[Header, ...] = ()
    tls: Tls = SYSTEM_TLS
    key_variable: str = OPENAI_KEY
    """Environment variable of the API key, set or not."""

    def __repr__(self) -> str:
        return f"Access({', '.join(name.decode() for name, _ in self.headers)})"

    def refusal(self, status: int) -> str:
        """Return advice after a 401 or 403: the variable to set."""
        sent = any(name.lower() in (b"authorization", b"x-api-key") for name, _ in self.headers)
        if sent:
            return f"HTTP {status} with the key that was sent; expected a key that it takes in ${self.key_variable}"
        return f"HTTP {status} without a key; expected one in ${self.key_variable}, or the variable of --api-key-env"


OPEN = Access()
"""Access without keys, by the system's authorities."""


def add_access_arguments(parser: argparse.ArgumentParser, requests: str) -> None:
    """Add the flags of ``read_access``; ``requests``: those that they hold for."""
    add = parser.add_argument_group("keys and TLS", f"for {requests}").add_argument
    add(
        "--api-key-env",
        metavar="NAME",
        help=f"environment variable of the API key ({OPENAI_KEY}; {ANTHROPIC_KEY} with --api messages)",
    )
    add(
        "--header-env",
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="request header with a secret, its value from an environment variable; may be repeated",
    )
    add(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="request header without a secret; may be repeated",
    )
    add("--ca", metavar="FILE", help="PEM certificates of authorities to trust, beside the system's or SSL_CERT_FILE's")
    add("--cert", metavar="FILE", help="PEM chain of the client's certificate")
    add("--key", metavar="FILE", help="PEM key of --cert, if in another file")


def read_access(args: argparse.Namespace, *, api: str | None = None, environ: Mapping[str, str] = os.environ) -> Access:
    """Return the access that the flags and the environment tell; raises InputError, which never quotes a secret."""
    headers = [*(_plain(text) for text in args.header), *(_from_variable(text, environ) for text in args.header_env)]
    variable = args.api_key_env or (ANTHROPIC_KEY if api == "messages" else OPENAI_KEY)
    names = {name.lower() for name, _ in headers}
    if not names & {b"authorization", b"x-api-key"}:
        headers += _key_headers(variable, environ, api=api, required=args.api_key_env is not None)
    elif args.api_key_env is not None:
        raise InputError("--api-key-env: beside a header with a key; expected one of the two")
    if len({name.lower() for name, _ in headers}) < len(headers):
        raise InputError("--header, --header-env: a header is named twice; expected each once")
    tls = Tls(args.ca, args.cert, args.key)
    if tls != SYSTEM_TLS:
        try:
            client_context(tls)
        except WireError as error:
            raise InputError(str(error)) from None
    return Access(tuple(headers), tls, variable)


def _key_headers(variable: str, environ: Mapping[str, str], *, api: str | None, required: bool) -> Sequence[Header]:
    if not required and not environ.get(variable):
        return ()
    key = _value("--api-key-env", variable, environ)
    bearer = (b"Authorization", b"Bearer " + key)
    # Anthropic's own header; vLLM and SGLang take a key for every API in Authorization only.
    return (bearer, (b"X-Api-Key", key)) if api == "messages" else (bearer,)


def _plain(text: str) -> Header:
    name, colon, value = text.partition(":")
    name = _checked_name("--header", name.strip() if colon else "")
    if SECRET_HEADER.search(name):
        raise InputError(
            f"--header {name}: may hold a secret, which all users see in the arguments; expected "
            f"--header-env {name}=VARIABLE"
        )
    return name.encode(), _checked_value(f"--header {name}", value.strip())


def _from_variable(text: str, environ: Mapping[str, str]) -> Header:
    name, _, variable = text.partition("=")
    name = _checked_name("--header-env", name)
    return name.encode(), _value(f"--header-env {name}=", variable, environ)


def _checked_name(flag: str, name: str) -> str:
    if not HEADER_NAME.fullmatch(name):
        raise InputError(
            f"{flag}: no header's name; expected {'NAME: VALUE' if flag == '--header' else 'NAME=VARIABLE'}"
        )
    if name.lower() in OWN_HEADERS:
        raise InputError(f"{flag} {name}: every request has its own; expected another header")
    return name


def _value(flag: str, variable: str, environ: Mapping[str, str]) -> bytes:
    # A name in small letters may be the secret itself, and is not repeated.
    shown = f"${variable}" if re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable) else "this variable"
    if not environ.get(variable):
        raise InputError(f"{flag}: {shown} is not set; expected the name of an environment variable with the value")
    return _checked_value(f"{flag}: {shown}", environ[variable])


def _checked_value(flag: str, value: str) -> bytes:
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        raise InputError(f"{flag}: no header's value; expected one line of printable ASCII, without spaces around it")
    return value.encode()
