"""``kvtape doctor``: checks of this machine and an engine (prefix cache, tokenizer) before a capture, with fixes."""

import argparse
import ctypes
import os
import platform
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from email import utils as mail
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from engines import control, readiness
from engines.access import Access, read_access
from engines.control import ControlClient
from engines.readiness import Target
from kvtape.entry import FIX, HOME, foreign_package, shared_package
from loadgen.core import bodies, vocabulary
from tracefile.commandline.parser import VERSION
from tracefile.commandline.printing import print_result, printable
from tracefile.hashing.hashkey import key_path, load_key
from tracefile.records.errors import InputError
from wire.errors import WireError
from wire.url import parse_listen

SPEED_PACKAGES: Final = ("msgspec", "numpy", "uvloop")
GIB: Final = 1 << 30
LEAST_FREE_BYTES: Final = 2 * GIB
LEAST_FILES: Final = 4096
"""File descriptors of a tap with 2,000 clients: two connections each."""

TIMEX_BYTES: Final = 512
"""Larger than Linux's ``struct timex``."""
UNSYNCHRONISED: Final = 5
SYNCHRONISED_FILE: Final = Path("/run/systemd/timesync/synchronized")
"""Created by systemd-timesyncd after it has set the clock."""
CONTAINER_FILES: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
CONTAINER_VARIABLES: Final = ("KUBERNETES_SERVICE_HOST", "container")
"""``container``: set by podman and systemd-nspawn."""
MOST_APART_S: Final = 3.0
"""Tolerance between two synchronized clocks: a ``Date`` header has a resolution of 1 s and may be 1 s old."""

State = Literal["ok", "warning", "fail"]


class Check(NamedTuple):
    """Result of a check of the machine or the engine."""

    name: str
    state: State
    result: str
    advice: str = ""
    """Fix for a state other than ok."""


class Diagnosis(msgspec.Struct, frozen=True):
    """JSON object of ``kvtape doctor --json``."""

    checks: tuple[Check, ...]


def run(flags: argparse.Namespace) -> int:
    """Print all checks; exit code 1 if a check failed."""
    if flags.probe and flags.url is None:
        raise InputError("--probe: expected --url URL of the engine")
    access = read_access(flags, url=flags.url)
    ahead_s, engine = (None, []) if flags.url is None else _check_engine(flags.url, access, probe=flags.probe)
    checks = [_packages(), _versions(), _key(), _disk(flags.output), _files(), _clock(ahead_s), _port(flags.listen)]
    checks += engine
    states = [check.state for check in checks]
    verdict = f"{'NOT READY' if 'fail' in states else 'ready'}: {states.count('ok')} of {len(states)} checks ok"
    lines = [verdict, *(f"{check.state:4} {check.name:9} {printable(check.result)}" for check in checks)]
    fixes = [f"{check.name}: {printable(check.advice)}" for check in checks if check.advice]
    print_result(Diagnosis(tuple(checks)), [*lines, *fixes], as_json=flags.json)
    return int("fail" in states)


def _packages() -> Check:
    """Check that all packages are kvtape's: other distributions also have a ``tap`` or a ``sim``."""
    conflict = foreign_package() or shared_package()
    if conflict is not None:
        return Check("packages", "fail", conflict, FIX)
    return Check("packages", "ok", f"all packages are in {HOME}")


def _versions() -> Check:
    versions = [f"kvtape {VERSION}", f"Python {platform.python_version()}"]
    for package in SPEED_PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return Check("versions", "ok", ", ".join(versions))


def _key() -> Check:
    path = key_path()
    if not path.exists():
        return Check("key file", "ok", f"{path} will be created at the first capture")
    try:
        key = load_key(path)
    except InputError as error:
        return Check("key file", "fail", str(error), "move it away: a new key is created, with new hashes")
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return Check("key file", "warning", f"{path} is readable by other users", f"chmod 600 {path}")
    return Check("key file", "ok", f"{path}, key {key.key_id}")


def _disk(output: Path) -> Check:
    folder = next(path for path in (output.resolve(), *output.resolve().parents) if path.is_dir())
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} is not writable", "use another -o/--output")
    free = shutil.disk_usage(folder).free
    free_text = f"{free / GIB:,.1f} GiB free at {folder}"
    return (
        Check("disk", "ok", free_text)
        if free >= LEAST_FREE_BYTES
        else Check("disk", "warning", free_text, "use a larger disk")
    )


def _files() -> Check:
    if sys.platform == "win32":
        return Check("files", "ok", "no limit of open files")
    import resource  # noqa: PLC0415 - Windows has none

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES:
        return Check("files", "warning", f"at most {soft} open files", f"ulimit -n {LEAST_FILES}: two for each client")
    return Check("files", "ok", f"{soft if soft >= 0 else 'any number of'} open files")


def _clock(ahead_s: float | None) -> Check:
    """Check the clock against the kernel, the time service and the engine's clock."""
    is_set, text = _is_synchronised(), f"{time.get_clock_info('monotonic').resolution * 1e9:g} ns"
    if ahead_s is not None and abs(ahead_s) > MOST_APART_S:
        direction = "ahead of" if ahead_s > 0.0 else "behind"
        advice = "synchronize both with a time server: chrony or NTP"
        return Check("clock", "warning", f"{text}, {abs(ahead_s):,.0f} s {direction} the engine's", advice)
    text += "" if ahead_s is None else f", within {MOST_APART_S:g} s of the engine's"
    if is_set:
        return Check("clock", "ok", f"{text}, set by a time server")
    if is_set is None or _in_container():
        where = "on this system" if is_set is None else "in a container"
        unknown = f"synchronization unknown {where}; run timedatectl on the host"
        return Check("clock", "ok", f"{text}; {unknown}")
    return Check(
        "clock", "warning", f"{text}, not synchronized: traces of several hosts may not align", "start chrony or NTP"
    )


def _is_synchronised() -> bool | None:
    """True if the kernel or systemd reports a synchronised clock; None: unknown."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None) if sys.platform == "linux" else None
    state = -1 if adjtimex is None else int(adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)))
    if SYNCHRONISED_FILE.exists():
        return True
    return None if state < 0 else state != UNSYNCHRONISED


def _in_container() -> bool:
    return any(name in os.environ for name in CONTAINER_VARIABLES) or any(file.exists() for file in CONTAINER_FILES)


def _seconds_ahead(date: str) -> float | None:
    """Return the seconds that this clock is ahead of a ``Date`` header just received; None: invalid header."""
    try:
        return time.time() - mail.parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return None


def _port(listen: str) -> Check:
    try:
        host, port = parse_listen(listen)
    except WireError as error:
        raise InputError(f"--listen: {error}") from None
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(addresses[0][0], socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(addresses[0][4])
    except OSError as error:
        return Check("port", "fail", f"{listen}: {error.strerror or error}", "use --listen with a free port")
    return Check("port", "ok", f"{listen} is free")


def _check_engine(url: str, access: Access, *, probe: bool) -> tuple[float | None, list[Check]]:
    """Return the seconds that this clock is ahead of the engine's, and the checks of the engine; None: unknown."""
    with control.ControlClient(url, access) as client:
        try:
            model = client.resolve_model("auto")
        except InputError as error:
            return _seconds_ahead(client.date), [Check("engine", "fail", str(error), "use its base URL, without /v1")]
        ahead_s = _seconds_ahead(client.date)  # after the latest response
        return ahead_s, list(_engine(client, model, probe=probe))


def _engine(client: ControlClient, model: str, *, probe: bool) -> Iterator[Check]:
    target = readiness.inspect_engine(client, model)
    cached = _probed(client, target) if probe else _cached(target)
    yield Check("engine", "ok", ", ".join(replace(target, reports_cached=True, has_reset=True).words()))
    for note in (*target.page_notes(), *target.load_notes()):
        yield Check("engine", "warning", note)
    yield cached
    yield _reset(target)


def _cached(target: Target) -> Check:
    if target.facts.engine.enable_prefix_caching is False:
        return Check(
            "cache", "warning", "the prefix cache is off: no prefix hits", "start the engine with prefix caching"
        )
    if target.reports_cached:
        return Check("cache", "ok", "cached tokens are reported")
    setting = target.dialect.cached_setting
    if target.reports_cached is False:
        return _unreported(setting)
    return Check(
        "cache",
        "warning",
        "unknown whether cached tokens are reported",
        f"test it with kvtape doctor --probe, two requests{f'; it needs {setting}' if setting else ''}",
    )


def _unreported(setting: str | None) -> Check:
    advice = f"start the engine with {setting}" if setting else "prefix hits stay unknown"
    return Check("cache", "warning", "cached tokens are not reported", advice)


def _probed(client: ControlClient, target: Target) -> Check:
    """Send a new prompt of two blocks twice: the second request must have a prefix hit."""
    probe = bodies.cache_probe(target.dialect, target.model or "", vocabulary.ORDINARY, target.block_size)
    try:
        *_, cached_tokens = [control.probed_cached_tokens(client, target.dialect, probe, "--probe") for _ in range(2)]
    except InputError as error:
        return Check("cache", "warning", str(error), "use a model that accepts token ids at /v1/completions")
    if cached_tokens is None:
        return _unreported(target.dialect.cached_setting)
    if not cached_tokens:
        return Check(
            "cache", "warning", "the repeated prompt has no prefix hit", "start the engine with prefix caching"
        )
    return Check("cache", "ok", f"cached tokens are reported: {cached_tokens} for the repeated prompt")


def _reset(target: Target) -> Check:
    if target.has_reset:
        return Check("reset", "ok", f"--reset-cache resets the prefix cache{target.dialect.reset_hint}")
    setting = target.dialect.reset_setting
    advice = f"start the engine with {setting}" if setting else "restart the engine between runs"
    return Check("reset", "warning", "no API call resets the prefix cache", advice)
