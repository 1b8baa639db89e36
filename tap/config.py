"""The tap's settings, checked once at the edge."""

from dataclasses import dataclass
from pathlib import Path

from tap.tokenizer import check_tokenizer
from tracefile.errors import InputError
from tracefile.schema import HashAlgorithm
from wire.errors import WireError
from wire.url import Origin, parse_listen, parse_url


@dataclass(frozen=True, slots=True)
class TapConfig:
    """What ``tap`` was told to do."""

    upstream: Origin
    listen: tuple[str, int]
    trace: str
    tokenizer: str
    """``ids``, ``bytes`` or a directory."""
    block_size: int | None
    """Null: 16, or the engine's if that is smaller."""
    algorithm: HashAlgorithm
    key_file: Path | None
    model: str | None
    """In place of what the upstream and each request call it. Null: those."""
    loras: tuple[str, ...]
    max_body_bytes: int
    queue_bytes: int
    engine_facts: bool
    wait_s: float
    drain_s: float
    overwrite: bool


def checked_upstream(text: str) -> Origin:
    """The upstream's address; raises InputError."""
    try:
        return parse_url(text)
    except WireError as error:
        raise InputError(f"--upstream: {error}") from None


def checked_listen(text: str) -> tuple[str, int]:
    """Host and port to listen on; raises InputError."""
    try:
        return parse_listen(text)
    except WireError as error:
        raise InputError(f"--listen: {error}") from None


def checked_tokenizer(text: str) -> str:
    """``ids``, ``bytes`` or a tokenizer's directory; raises InputError."""
    return text if text in ("ids", "bytes") else check_tokenizer(text)


def checked_trace(path: str, *, overwrite: bool) -> str:
    """The path of a trace to be written; raises InputError if one is there already."""
    found = Path(path)
    if found.is_dir():
        raise InputError(f"--trace {path}: is a directory; expected a file to write")
    if found.is_file() and found.stat().st_size and not overwrite:
        raise InputError(f"--trace {path}: already has a trace; expected a new file, or --overwrite")
    return path


def at_least(flag: str, value: float, least: float) -> None:
    """Raise InputError if a flag's number is too small."""
    if not value >= least:
        raise InputError(f"{flag} {value:g}: expected {least:g} or more")
