"""``kvtape doctor``: checks of this machine and of an engine before a capture, each with the way to fix it."""

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
from kvtape.entry import HOME, MEND, foreign_room, shared_room
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
"""Open files of a tap with two thousand clients: a connection to each side of each."""

TIMEX_BYTES: Final = 512
"""More than Linux's ``struct timex``."""
UNSYNCHRONISED: Final = 5
SYNCHRONISED_FILE: Final = Path("/run/systemd/timesync/synchronized")
"""Made by systemd's time service when it has set the clock."""
CONTAINER_FILES: Final = (Path("/.dockerenv"), Path("/run/.containerenv"))
CONTAINER_VARIABLES: Final = ("KUBERNETES_SERVICE_HOST", "container")
"""The second is set by podman and systemd-nspawn."""
MOST_APART_S: Final = 3.0
"""Between two clocks that are set: a ``Date`` has whole seconds, may be a second old, and was made a call ago."""

State = Literal["ok", "look", "fail"]


class Check(NamedTuple):
    """Result of a check."""

    name: str
    state: State
    found: str
    advice: str = ""
    """Mend of a state that is not ok."""


class Diagnosis(msgspec.Struct, frozen=True):
    """Content of ``--json``."""

    checks: tuple[Check, ...]


def run(flags: argparse.Namespace) -> int:
    """Print every check; 1 if one failed."""
    if flags.probe and flags.url is None:
        raise InputError("--probe: expected --url URL of the engine")
    access = read_access(flags, url=flags.url)
    apart_s, engine = (None, []) if flags.url is None else _asked(flags.url, access, probe=flags.probe)
    checks = [_packages(), _versions(), _key(), _disk(flags.output), _files(), _clock(apart_s), _port(flags.listen)]
    checks += engine
    lines = [f"{each.state:4} {each.name:9} {printable(each.found)}" for each in checks]
    mends = [f"{each.name}: {printable(each.advice)}" for each in checks if each.advice]
    print_result(Diagnosis(tuple(checks)), [*lines, *mends], as_json=flags.json)
    return 1 if any(each.state == "fail" for each in checks) else 0


def _packages() -> Check:
    """Compare the places of all rooms with this one's: other distributions have a ``tap`` or a ``sim``, too."""
    wrong = foreign_room() or shared_room()
    if wrong is not None:
        return Check("packages", "fail", wrong, MEND)
    return Check("packages", "ok", f"all commands are those of {HOME}")


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
        return Check("key file", "ok", f"{path} is made at the first capture")
    try:
        key = load_key(path)
    except InputError as error:
        return Check("key file", "fail", str(error), "move it away; a new one starts new hashes")
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return Check("key file", "look", f"{path} is read by other users", f"chmod 600 {path}")
    return Check("key file", "ok", f"{path}, key {key.key_id}")


def _disk(output: Path) -> Check:
    folder = next(path for path in (output.resolve(), *output.resolve().parents) if path.is_dir())
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "another -o/--output")
    free = shutil.disk_usage(folder).free
    free_text = f"{free / GIB:,.1f} GiB free at {folder}"
    return (
        Check("disk", "ok", free_text)
        if free >= LEAST_FREE_BYTES
        else Check("disk", "look", free_text, "a larger disk")
    )


def _files() -> Check:
    if sys.platform == "win32":
        return Check("files", "ok", "no limit of open files")
    import resource  # noqa: PLC0415 - Windows has none

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES:
        return Check("files", "look", f"{soft} open files at most", f"ulimit -n {LEAST_FILES}: two for each client")
    return Check("files", "ok", f"{soft if soft >= 0 else 'any number of'} open files")


def _clock(apart_s: float | None) -> Check:
    """Judge the clock by the kernel, the time service and the engine's clock; one that nothing speaks against is ok."""
    is_set, figure = _is_synchronised(), f"{time.get_clock_info('monotonic').resolution * 1e9:g} ns"
    if apart_s is not None and abs(apart_s) > MOST_APART_S:
        way = "ahead of" if apart_s > 0.0 else "behind"
        advice = "set both by a time server: chrony or NTP"
        return Check("clock", "look", f"{figure}, {abs(apart_s):,.0f} s {way} the engine's", advice)
    figure += "" if apart_s is None else f", within {MOST_APART_S:g} s of the engine's"
    if is_set:
        return Check("clock", "ok", f"{figure}, set by a time server")
    if is_set is None or _in_container():
        why = "the kernel does not say" if is_set is None else "a container does not see the host's time service"
        unknown = f"cannot tell here if a time server sets it, because {why}; on the host run timedatectl"
        return Check("clock", "ok", f"{figure}; {unknown}")
    return Check(
        "clock", "look", f"{figure}, set by no time server: hosts' traces may not align", "start chrony or NTP"
    )


def _is_synchronised() -> bool | None:
    """Ask the kernel, then systemd's time service; None: neither tells."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None) if sys.platform == "linux" else None
    state = -1 if adjtimex is None else int(adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)))
    if SYNCHRONISED_FILE.exists():
        return True
    return None if state < 0 else state != UNSYNCHRONISED


def _in_container() -> bool:
    return any(name in os.environ for name in CONTAINER_VARIABLES) or any(file.exists() for file in CONTAINER_FILES)


def _seconds_ahead(date: str) -> float | None:
    """Return this clock's seconds ahead of a ``Date`` that has just come; None: it tells no time."""
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
        return Check("port", "fail", f"{listen}: {error.strerror or error}", "--listen with a free port")
    return Check("port", "ok", f"{listen} is free")


def _asked(url: str, access: Access, *, probe: bool) -> tuple[float | None, list[Check]]:
    """Return this clock's seconds ahead of the engine's, None if it tells no time, and the engine's checks."""
    with control.ControlClient(url, access) as client:
        try:
            model = client.resolve_model("auto")
        except InputError as error:
            return _seconds_ahead(client.date), [Check("engine", "fail", str(error), "its base URL, without /v1")]
        ahead_s = _seconds_ahead(client.date)  # now: the date is of the page that was read last
        return ahead_s, list(_engine(client, model, probe=probe))


def _engine(client: ControlClient, model: str, *, probe: bool) -> Iterator[Check]:
    target = readiness.inspect_engine(client, model)
    cached = _probed(client, target) if probe else _cached(target)
    yield Check("engine", "ok", ", ".join(replace(target, reports_cached=True, has_reset=True).words()))
    for note in (*target.page_notes(), *target.load_notes()):
        yield Check("engine", "look", note)
    yield cached
    yield _reset(target)


def _cached(target: Target) -> Check:
    if target.facts.engine.enable_prefix_caching is False:
        return Check("cache", "look", "its prefix cache is off: no request can hit it", "start it with prefix caching")
    if target.reports_cached:
        return Check("cache", "ok", "cached tokens are reported")
    setting = target.dialect.cached_setting
    if target.reports_cached is False:
        return _unreported(setting)
    return Check(
        "cache",
        "look",
        "no page of it tells if cached tokens are reported",
        f"kvtape doctor --probe tries it with two requests{f'; it needs {setting}' if setting else ''}",
    )


def _unreported(setting: str | None) -> Check:
    advice = f"start it with {setting}" if setting else "hits stay unknown"
    return Check("cache", "look", "cached tokens are not reported", advice)


def _probed(client: ControlClient, target: Target) -> Check:
    """Send a new prompt of two blocks twice: the second time they are cached."""
    probe = bodies.cache_probe(target.dialect, target.model or "", vocabulary.ORDINARY, target.block_size)
    try:
        *_, cached_tokens = [control.probed_cached_tokens(client, target.dialect, probe, "--probe") for _ in range(2)]
    except InputError as error:
        return Check("cache", "look", str(error), "a model that takes prompts of token ids at /v1/completions")
    if cached_tokens is None:
        return _unreported(target.dialect.cached_setting)
    if not cached_tokens:
        return Check("cache", "look", "the same prompt again hit nothing", "start it with prefix caching")
    return Check("cache", "ok", f"cached tokens are reported: {cached_tokens} of the same prompt again")


def _reset(target: Target) -> Check:
    if target.has_reset:
        return Check("reset", "ok", f"--reset-cache empties the prefix cache{target.dialect.reset_hint}")
    setting = target.dialect.reset_setting
    advice = f"start it with {setting}" if setting else "restart it between runs"
    return Check("reset", "look", "no call is known to empty the prefix cache", advice)
