"""Output files: never an input of the command, never over a file of another kind, and written atomically."""

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tracefile.records.errors import InputError
from tracefile.storage.durable import replace_durably
from tracefile.storage.segments import becomes_segment, manifests_of, trace_files

Name = str | os.PathLike[str]

_SNIFFED_BYTES = 4096


class Kind(NamedTuple):
    """A kind of file, detected by its first bytes."""

    name: str
    begins: re.Pattern[bytes]


PAGE = Kind("an HTML page", re.compile(rb"\s*(?:<!doctype\s+html|<html)", re.IGNORECASE))
MODEL = Kind("a model.json", re.compile(rb'\s*\{\s*"schema"\s*:\s*"kvtape-model/'))
MANIFEST = Kind("a manifest of segments", re.compile(rb'\s*\{\s*"schema"\s*:\s*"kvtape-segments/'))
PARQUET = Kind("a Parquet file", re.compile(rb"PAR1"))


def free_name(stem: str) -> str:
    """Return the first unused name of STEM.jsonl.zst, STEM-2.jsonl.zst, … in the working folder."""
    existing = os.listdir()
    for number in itertools.count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        # Files beside a trace: TRACE.summary.json, TRACE.shard0.jsonl, NAME-000001.jsonl.zst, NAME.segments.json.
        local = re.compile(rf"{re.escape(name)}(-\d{{6}})?\.(jsonl|segments)")
        if not any(map(local.match, existing)):
            break
    return f"{name}.jsonl.zst"


def output_name(output: Name | None, stem: str) -> str:
    """Return ``--output``, or an unused name."""
    return free_name(stem) if output is None else os.fspath(output)


def refuse_inputs(output: Name, inputs: Iterable[Name], flag: str = "--output") -> None:
    """Raise InputError if ``output`` is an input, by any name or link, or would be a segment of an input."""
    for given in inputs:
        if any(_is_same(output, file) for file in _files_of(given)):
            raise InputError(f"{flag} {os.fspath(output)}: an input of this command ({given}); expected another file")
        if becomes_segment(output, given):
            raise InputError(f"{flag} {os.fspath(output)}: a segment of the input {given}; expected another name")


def mode_like(inputs: Iterable[Name]) -> int:
    """Return the permissions of a new file: those that all ``inputs`` have."""
    mode = 0o666
    for file in {file for given in inputs for file in _files_of(given)}:
        with contextlib.suppress(OSError, ValueError):
            input_mode = os.stat(file).st_mode
            mode &= stat.S_IMODE(input_mode) if stat.S_ISREG(input_mode) else mode
    return mode | stat.S_IRUSR | stat.S_IWUSR


def check_output(
    path: Name | None, kind: Kind, inputs: Iterable[Name], flag: str = "--html", *, overwrite: bool = True
) -> None:
    """Raise InputError if ``path`` is an input, or exists and is not of this ``kind`` or not to be overwritten.

    None: no output.
    """
    if path is None:
        return
    refuse_inputs(path, inputs, flag)
    _refuse_other(path, kind, flag)
    if not overwrite and is_replaceable(path) and os.path.exists(path) and os.path.getsize(path):
        raise InputError(f"{flag} {os.fspath(path)}: already exists; expected a new file, or --overwrite")


def replace_output(path: Name, content: bytes, kind: Kind, flag: str = "--html") -> None:
    """Write a file atomically. Raises InputError like ``check_output``."""
    _refuse_other(path, kind, flag)
    try:
        if is_replaceable(path):
            replace_durably(Path(os.path.realpath(path)), content)
        else:
            Path(path).write_bytes(content)
    except OSError as error:
        raise InputError(f"{flag} {os.fspath(path)}: {error.strerror}; expected a writable path") from error


def is_replaceable(path: Name) -> bool:
    """Return whether ``path`` is a regular file or does not exist: devices and pipes are written directly."""
    if os.fspath(path).startswith(("/dev/", "/proc/")):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _files_of(given: Name) -> Iterator[Name]:
    """Yield an input and its files: the segments and manifest of a trace, or the files of a folder."""
    path = os.fspath(given).removeprefix("file://")
    yield path
    with contextlib.suppress(InputError, OSError):
        yield from manifests_of(path)
        try:
            yield from trace_files(path)
        except InputError:
            yield from os.scandir(path)


def _is_same(left: Name, right: Name) -> bool:
    if os.path.realpath(left) == os.path.realpath(right):
        return True
    try:
        status = os.stat(left)
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(right))
    except (OSError, ValueError):
        return False


def _refuse_other(path: Name, kind: Kind, flag: str) -> None:
    where = os.fspath(path)
    if os.path.isdir(path):
        raise InputError(f"{flag} {where}: is a directory; expected a file to write")
    if not os.path.isdir(os.path.dirname(where) or "."):
        raise InputError(f"{flag} {where}: its folder does not exist; expected an existing folder")
    if not is_replaceable(path) or not os.path.exists(path):
        return
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except OSError as error:
        raise InputError(f"{flag} {where}: {error.strerror}; expected a writable path") from error
    if head and not kind.begins.match(head):
        raise InputError(f"{flag} {where}: already exists and is not {kind.name}; expected a new file, or {kind.name}")
