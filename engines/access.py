"""Access to an engine: API keys, headers and TLS files, from the same flags in every command."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from tracefile.records.errors import InputError
from wire.errors import WireError
from wire.head import Header
from wire.tls import SYSTEM_TLS, Tls, client_context

OPENAI_KEY, ANTHROPIC_KEY = "OPENAI_API_KEY", "ANTHROPIC_API_KEY"
DEFAULT_PORTS = (8000, 30000, 8080, 11434, 1234)
"""Default ports of vLLM and TensorRT-LLM, SGLang, llama.cpp and mlx_lm, Ollama, LM Studio."""
REFUSED = frozenset({401, 403})
"""HTTP statuses for a missing or wrong key."""

BASIC = "--header-env Authorization=VARIABLE, in it `Basic` and the base64 of USER:PASSWORD"
ANTHROPIC_VERSION: Header = (b"Anthropic-Version", b"2023-06-01")
"""Header that Anthropic's API requires; engines ignore the header."""
ANTHROPIC_HOST = "anthropic.com"

HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
SECRET_HEADER = re.compile(r"authorization|cookie|key|token|secret|password|credential|signature", re.IGNORECASE)
RESERVED_HEADERS = frozenset(
    {
        *("host", "content-length", "content-type", "transfer-encoding", "connection", "keep-alive", "te", "trailer"),
        *("upgrade", "expect", "accept", "accept-encoding", "proxy-connection", "x-request-id"),
    }
)
"""Headers that every request has, or that would change its framing; flags cannot set them."""


class Access(msgspec.Struct, frozen=True, array_like=True):
    """Headers and TLS of every request to an engine. Header values are secrets, and are never printed or written."""

    headers: tuple[Header, ...] = ()
    tls: Tls = SYSTEM_TLS
    key_variable: str = OPENAI_KEY
    """Environment variable of the API key, whether set or not."""
    secrets: tuple[tuple[bytes, str], ...] = ()
    """Headers with a secret, with their environment variables."""

    def __repr__(self) -> str:
        return f"Access({', '.join(name.decode() for name, _ in self.headers)})"

    def refusal(self, status: int, challenge: bytes = b"") -> str:
        """Return the error for a 401 or 403 with the variable to set. ``challenge``: ``WWW-Authenticate`` header."""
        passwords = [variable for name, variable in self.secrets if _is_basic(dict(self.headers)[name])]
        keys = [variable for _, variable in self.secrets if variable not in passwords]
        if _is_basic(challenge):
            return _refused(status, "password", passwords) or f"HTTP {status} of Basic authentication; expected {BASIC}"
        if passwords and not keys:
            return f"HTTP {status} behind Basic authentication; expected the engine's key in --header-env NAME=VARIABLE"
        missing = f"expected one in ${self.key_variable}, or the variable of --api-key-env"
        return _refused(status, "key", keys) or f"HTTP {status} without a key; {missing}"


def _is_basic(value: bytes) -> bool:
    return value[:6].lower() == b"basic "


def _refused(status: int, secret: str, variables: Sequence[str]) -> str:
    named = " or ".join(f"${name}" for name in variables)
    return named and f"HTTP {status} with the {secret} that was sent; expected a valid {secret} in {named}"


OPEN = Access()
"""Access without keys, with the system's certificate authorities."""


def add_access_arguments(parser: argparse.ArgumentParser, requests: str) -> None:
    """Add the flags of ``read_access``; ``requests``: the requests they apply to, for the help."""
    add = parser.add_argument_group("keys and TLS", f"for {requests}").add_argument
    add(
        "--api-key-env",
        metavar="NAME",
        help=f"environment variable of the API key (default {OPENAI_KEY}; {ANTHROPIC_KEY} with --api messages)",
    )
    add(
        "--header-env",
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="request header with a secret, its value from a variable, such as X-Key=GATEWAY_KEY; may be repeated",
    )
    add(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="request header without a secret, such as 'X-Team: search'; may be repeated",
    )
    add("--ca", metavar="FILE", help="PEM certificates of authorities to trust, beside the system's or SSL_CERT_FILE's")
    add("--cert", metavar="FILE", help="PEM chain of the client's certificate")
    add("--key", metavar="FILE", help="PEM key of --cert, if in another file")


def read_access(
    args: argparse.Namespace,
    *,
    api: str | None = None,
    url: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Access:
    """Return the access by flags and environment; raises InputError, which never quotes a secret."""
    headers = [*(_plain(text) for text in args.header), *(_from_variable(text, environ) for text in args.header_env)]
    secrets = [(name.encode(), variable) for name, _, variable in (text.partition("=") for text in args.header_env)]
    variable = args.api_key_env or (ANTHROPIC_KEY if api == "messages" else OPENAI_KEY)
    names = {name.lower() for name, _ in headers}
    if not names & {b"authorization", b"x-api-key"}:
        key = _key(variable, environ, required=args.api_key_env is not None)
        key_headers = _key_headers(key, api, url)
        headers += key_headers
        secrets += [(key_headers[0][0], variable)] if key_headers else []
    elif args.api_key_env is not None:
        raise InputError("--api-key-env: beside a header with a key; expected one of the two")
    if api == "messages" and ANTHROPIC_VERSION[0].lower() not in names:
        headers.append(ANTHROPIC_VERSION)
    if len({name.lower() for name, _ in headers}) < len(headers):
        raise InputError("--header, --header-env: a header is named twice; expected each once")
    tls = Tls(args.ca, args.cert, args.key)
    if tls != SYSTEM_TLS:
        try:
            client_context(tls)
        except WireError as error:
            raise InputError(str(error)) from None
    return Access(tuple(headers), tls, variable, tuple(secrets))


def _key(variable: str, environ: Mapping[str, str], *, required: bool) -> bytes:
    return _value("--api-key-env", variable, environ) if required or environ.get(variable) else b""


def _key_headers(key: bytes, api: str | None, url: str | None) -> Sequence[Header]:
    """Return the key headers of the API; vLLM and SGLang accept the key of every API only in ``Authorization``."""
    if not key:
        return ()
    bearer, api_key = (b"Authorization", b"Bearer " + key), (b"X-Api-Key", key)
    if api != "messages":
        return (bearer,)
    # Anthropic reads a bearer as another kind of secret, and refuses an API key there.
    return (api_key,) if (urlsplit(url or "").hostname or "").endswith(ANTHROPIC_HOST) else (bearer, api_key)


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
            f"{flag}: invalid header name; expected {'NAME: VALUE' if flag == '--header' else 'NAME=VARIABLE'}"
        )
    if name.lower() in RESERVED_HEADERS:
        raise InputError(f"{flag} {name}: reserved: kvtape sets it in every request; expected another header")
    return name


def _value(flag: str, variable: str, environ: Mapping[str, str]) -> bytes:
    # A lower-case name may be the secret itself, and is not printed.
    shown = f"${variable}" if re.fullmatch(r"[A-Z_][A-Z0-9_]*", variable) else "this variable"
    if not environ.get(variable):
        raise InputError(f"{flag}: {shown} is not set; expected the name of an environment variable with the value")
    return _checked_value(f"{flag}: {shown}", environ[variable])


def _checked_value(flag: str, value: str) -> bytes:
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        raise InputError(f"{flag}: invalid header value; expected a line of printable ASCII without spaces around it")
    return value.encode()
