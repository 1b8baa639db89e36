"""Settings of ``tap``, parsed once from the flags and sent to all processes."""

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
    """Settings of ``tap``; fields are named as their flags, or by their unit."""

    upstreams: tuple[Origin, ...]
    upstreams_file: str | None
    route: str
    """Policy of ``engines.routing``, or FILE.py:FUNCTION."""
    listen: tuple[str, int]
    access: Access
    """Access for the tap's control calls; its TLS also for relayed requests."""
    workers: int
    trace: str
    rotate_bytes: int | None
    """Size at which a segment is closed. None: never."""
    rotate_s: float | None
    """Age at which a segment is closed. None: never."""
    keep_s: float | None
    """Age at which a closed segment is deleted. None: never."""
    upload: str | None
    """fsspec URL for closed segments. None: no upload."""
    resume: bool
    """Continue the existing trace after its last complete record."""
    overwrite: bool
    keep_headers: tuple[str, ...]
    """Recorded request headers, in lower case."""
    tokenizer: str
    """``engine``, ``ids`` or a directory; ``auto`` becomes ``engine`` or ``ids`` once the engine is reached."""
    block_size: int | None
    """Block size of the hashes. None: 16, or the engine's block size of 8 to 15."""
    algorithm: HashAlgorithm
    key_file: str | None
    model: str | None
    """Recorded model name. None: the names of the upstream and the requests."""
    loras: tuple[str, ...]
    """Names of models that are LoRA adapters."""
    max_body_bytes: int
    """Capture limit of a body, also once decoded."""
    queue_bytes: int
    """Memory budget of captures, over all workers."""
    inject: frozenset[Injection]
    """Fields to inject (usage, token ids), as far as the upstream's dialect supports them."""
    inject_auto: bool
    """True: inject by the detected dialect of each upstream."""
    dialect: DialectName | None
    """Engine dialect. None: detected by the engine's metrics, else vllm."""
    engine_facts: bool
    admin: tuple[str, int] | None
    file_mode: int
    """Permissions of created files."""
    drain_s: float
    """Time to finish requests in flight when the tap ends."""


def read_upstreams(file: str) -> tuple[Origin, ...]:
    """Read upstreams from a file with one URL per line; ``#`` starts a comment. Raises InputError naming the line."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"--upstreams {file}: cannot be read ({reason}); expected one URL per line") from None
    words = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1))
    origins = distinct_origins((f"--upstreams {file}:{number}", url) for number, url in words if url)
    if not origins:
        raise InputError(f"--upstreams {file}: no upstreams; expected one URL per line")
    return origins


def distinct_origins(urls: Iterable[tuple[str, str]]) -> tuple[Origin, ...]:
    """Return the origins of (source, URL) pairs; raises InputError naming the source of a duplicate."""
    origins: list[Origin] = []
    for source, url in urls:
        try:
            origin = parse_url(url)
        except WireError as error:
            raise InputError(f"{source}: {error}") from None
        server = origin.without_endpoint()
        if server != origin:
            suffix = origin.base_path.removeprefix(server.base_path)
            print(f"tap: {source}: {suffix} ignored: clients send it in their paths", file=sys.stderr)
        if server in origins:
            raise InputError(f"{source}: {server} is listed twice; expected each upstream once")
        origins.append(server)
    return tuple(origins)
