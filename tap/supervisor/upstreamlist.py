"""Upstreams as flags or a file name them, and the check of their health."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tracefile.records.errors import InputError
from wire.errors import WireError
from wire.url import Origin, parse_url


class UpstreamList(NamedTuple):
    """Upstreams as flags or a file name them."""

    origins: tuple[Origin, ...]
    draining: frozenset[Origin] = frozenset()
    """Those among them that get no new sessions."""
    stopped: frozenset[Origin] = frozenset()
    """Those among them that get no requests."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """Checks of the upstreams by a page of theirs."""

    path: str
    every_s: float
    fall: int
    """Failed checks in a row after which an upstream gets no requests."""
    rise: int
    """Checks in a row without failure after which it gets some again."""

    @property
    def timeout_s(self) -> float:
        return min(self.every_s, MAX_CHECK_S)


MAX_CHECK_S = 5.0


def checked_health(path: str | None, every_s: float, fall: int, rise: int) -> HealthCheck | None:
    for flag, value in (("--health-fall", fall), ("--health-rise", rise)):
        if value < 1:
            raise InputError(f"{flag} {value}: expected 1 or more")
    if every_s <= 0:
        raise InputError(f"--health-interval {every_s:g}s: expected more than 0")
    if path is None:
        return None
    if not path.startswith("/") or not path.isascii() or " " in path:
        raise InputError(f"--health-check {path}: expected a path, such as /health")
    return HealthCheck(path, every_s, fall, rise)


def checked_upstreams(urls: Sequence[str], file: Path | None) -> UpstreamList:
    if bool(urls) == (file is not None):
        given = "both were given" if urls else "none was given"
        raise InputError(f"--upstream URL, --upstreams FILE: {given}; expected exactly one of the two")
    if file is not None:
        return read_upstreams(file)
    return UpstreamList(_distinct([(_checked_url(url, "--upstream"), f"--upstream {url}") for url in urls]))


DRAIN, STOP = "drain", "stop"


def read_upstreams(file: Path) -> UpstreamList:
    """Read upstreams from a file: a URL a line, ``#`` starts a comment. Raises InputError that names the line.

    ``drain URL``: an upstream without new sessions. ``stop URL``: one without requests.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"--upstreams {file}: cannot be read ({reason}); expected a file with a URL a line") from None
    found = []
    out: dict[str, set[Origin]] = {DRAIN: set(), STOP: set()}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"--upstreams {file}:{number}"
        ordered = words[0] in out and len(words) > 1
        origin = _checked_url(" ".join(words[1:] if ordered else words), place)
        found.append((origin, place))
        if ordered:
            out[words[0]].add(origin)
    if len(out[DRAIN]) + len(out[STOP]) == len(found):
        expected = "one that is neither drained nor stopped" if found else "a URL a line"
        raise InputError(f"--upstreams {file}: names no upstream for new sessions; expected {expected}")
    return UpstreamList(_distinct(found), frozenset(out[DRAIN]), frozenset(out[STOP]))


def _checked_url(text: str, place: str) -> Origin:
    try:
        origin = parse_url(text)
    except WireError as error:
        raise InputError(f"{place}: {error}") from None
    server = origin.without_endpoint()
    if server != origin:
        left = origin.base_path.removeprefix(server.base_path)
        print(f"tap: {place} {text}: {left} is left out, since it is in the clients' paths", file=sys.stderr)
    return server


def _distinct(found: Sequence[tuple[Origin, str]]) -> tuple[Origin, ...]:
    origins: list[Origin] = []
    for origin, place in found:
        if origin in origins:
            raise InputError(f"{place}: {origin} is named twice; expected each upstream once")
        origins.append(origin)
    return tuple(origins)
