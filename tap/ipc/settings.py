"""Settings of ``tap``: made once of the flags, and given to all of its processes as they are."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from engines.access import Access
from engines.dialect import DialectName
from tracefile.records.errors import InputError
from tracefile.records.schema import HashAlgorithm
from wire.errors import WireError
from wire.url import Origin, parse_url

Injection = Literal["usage", "token-ids"]
AUTO = "auto"
NAMED_TOKENIZERS = ("engine", "ids")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``tap``; a field is named like its flag, or says its unit."""

    upstreams: tuple[Origin, ...]
    upstreams_file: str | None
    route: str
    """Policy of ``engines.routing``, or a user's own: FILE.py:FUNCTION."""
    listen: tuple[str, int]
    access: Access
    """Of the tap's own calls; its TLS of relayed requests, too."""
    workers: int
    trace: str
    rotate_bytes: int | None
    """Size at which a segment of the trace ends. Null: never."""
    rotate_s: float | None
    """Age at which a segment of the trace ends. Null: never."""
    keep_s: float | None
    """Age at which a closed segment is deleted. Null: never."""
    upload: str | None
    """fsspec URL for closed segments. Null: none."""
    resume: bool
    """Continue the existing trace from its last whole record."""
    overwrite: bool
    keep_headers: tuple[str, ...]
    """Request headers that records keep, in lower case."""
    tokenizer: str
    """``engine``, ``ids`` or a directory; ``auto``, until the engine is there: engine, or else ids."""
    block_size: int | None
    """Null: 16, or the engine's if that is 8 to 15."""
    algorithm: HashAlgorithm
    key_file: str | None
    model: str | None
    """Model name in place of the upstream's and the requests'. Null: theirs."""
    loras: tuple[str, ...]
    """Names of models that are LoRA adapters."""
    max_body_bytes: int
    """Largest body that is copied, and read, decoded."""
    queue_bytes: int
    """Memory of all workers for copies."""
    inject: frozenset[Injection]
    """Additions to requests, as far as each upstream's dialect has them."""
    inject_auto: bool
    """Each upstream is asked for the injections that its own dialect has."""
    dialect: DialectName | None
    """Null: by the engine's metrics, else vllm."""
    engine_facts: bool
    admin: tuple[str, int] | None
    file_mode: int
    """Permissions of the files that are made."""
    drain_s: float
    """Time for requests in flight when the tap ends."""


def read_upstreams(file: str) -> tuple[Origin, ...]:
    """Read upstreams from a file: a URL a line, ``#`` starts a comment. Raises InputError that names the line."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"--upstreams {file}: cannot be read ({reason}); expected a file with a URL a line") from None
    words = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    origins = distinct_origins((f"--upstreams {file}:{number}", url) for number, url in words if url)
    if not origins:
        raise InputError(f"--upstreams {file}: names no upstream; expected a URL a line")
    return origins


def distinct_origins(urls: Iterable[tuple[str, str]]) -> tuple[Origin, ...]:
    """Return the servers of URLs, each with its place for an error; raises InputError for one that is named twice."""
    origins: list[Origin] = []
    for place, url in urls:
        try:
            origin = parse_url(url)
        except WireError as error:
            raise InputError(f"{place}: {error}") from None
        server = origin.without_endpoint()
        if server != origin:
            left = origin.base_path.removeprefix(server.base_path)
            print(f"tap: {place}: {left} is left out, since it is in the clients' paths", file=sys.stderr)
        if server in origins:
            raise InputError(f"{place}: {server} is named twice; expected each upstream once")
        origins.append(server)
    return tuple(origins)
