"""Files that commands write: never one of their inputs, never over a file of another kind, and whole or not at all."""

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
    """A kind of file, told by its first bytes."""

    name: str
    begins: re.Pattern[bytes]


PAGE = Kind("an HTML page", re.compile(rb"\s*(?:<!doctype\s+html|<html)", re.IGNORECASE))
MODEL = Kind("a model.json", re.compile(rb'\s*\{\s*"schema"\s*:\s*"kvtape-model/'))
MANIFEST = Kind("a manifest of segments", re.compile(rb'\s*\{\s*"schema"\s*:\s*"kvtape-segments/'))
PARQUET = Kind("a Parquet file", re.compile(rb"PAR1"))


def free_name(stem: str) -> str:
    """Return the first of STEM.jsonl.zst, STEM-2.jsonl.zst, … in the working folder without a file of its own there."""
    there = os.listdir()
    for number in itertools.count(1):
        name = stem if number == 1 else f"{stem}-{number}"
        # Beside TRACE: TRACE.summary.json, TRACE.shard0.jsonl, NAME-000001.jsonl.zst, NAME.segments.json.
        local = re.compile(rf"{re.escape(name)}(-\d{{6}})?\.(jsonl|segments)")
        if not any(map(local.match, there)):
            break
    return f"{name}.jsonl.zst"


def output_name(output: Name | None, stem: str) -> str:
    """Return ``--output``, or a name that no file has."""
    return free_name(stem) if output is None else os.fspath(output)


def refuse_inputs(output: Name, inputs: Iterable[Name], flag: str = "--output") -> None:
    """Raise InputError if ``output`` is one of ``inputs``, by any name or link, or would be a segment of one."""
    for given in inputs:
        if any(_is_same(output, file) for file in _files_of(given)):
            raise InputError(f"{flag} {os.fspath(output)}: an input of this command ({given}); expected another file")
        if becomes_segment(output, given):
            raise InputError(f"{flag} {os.fspath(output)}: a segment of the input {given}; expected another name")


def mode_like(inputs: Iterable[Name]) -> int:
    """Return the permissions of a new file made of ``inputs``: those that all of these files give."""
    mode = 0o666
    for file in {file for given in inputs for file in _files_of(given)}:
        with contextlib.suppress(OSError, ValueError):
            there = os.stat(file).st_mode
            mode &= stat.S_IMODE(there) if stat.S_ISREG(there) else mode
    return mode | stat.S_IRUSR | stat.S_IWUSR


def check_output(
    path: Name | None, kind: Kind, inputs: Iterable[Name], flag: str = "--html", *, overwrite: bool = True
) -> None:
    """Raise InputError unless ``path`` is no input and is new, or of this ``kind`` and to be overwritten.

    None: nothing is to be written.
    """
    if path is None:
        return
    refuse_inputs(path, inputs, flag)
    _refuse_other(path, kind, flag)
    if not overwrite and is_replaceable(path) and os.path.exists(path) and os.path.getsize(path):
        raise InputError(f"{flag} {os.fspath(path)}: already there; expected a new file, or --overwrite")


def replace_output(path: Name, content: bytes, kind: Kind, flag: str = "--html") -> None:
    """Write a whole file; readers see the old one or the new one. Raises InputError like ``check_output``."""
    _refuse_other(path, kind, flag)
    try:
        if is_replaceable(path):
            replace_durably(Path(os.path.realpath(path)), content)
        else:
            Path(path).write_bytes(content)
    except OSError as error:
        raise InputError(f"{flag} {os.fspath(path)}: {error.strerror}; expected a writable path") from error


def is_replaceable(path: Name) -> bool:
    """Return whether ``path`` is a regular file or none yet: devices and pipes are written in place."""
    if os.fspath(path).startswith(("/dev/", "/proc/")):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def _files_of(given: Name) -> Iterator[Name]:
    """The input itself and the files that it stands for: a trace's segments and their manifest, or a folder's files."""
    path = os.fspath(given).removeprefix("file://")
    yield path
    with contextlib.suppress(InputError, OSError):
        yield from manifests_of(path)
        try:
            yield from trace_files(path)
        except InputError:
            yield from os.scandir(path)


def _is_same(one: Name, other: Name) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        there = os.stat(one)
        return stat.S_ISREG(there.st_mode) and os.path.samestat(there, os.stat(other))
    except (OSError, ValueError):
        return False


def _refuse_other(path: Name, kind: Kind, flag: str) -> None:
    where = os.fspath(path)
    if os.path.isdir(path):
        raise InputError(f"{flag} {where}: is a directory; expected a file to write")
    if not os.path.isdir(os.path.dirname(where) or "."):
        raise InputError(f"{flag} {where}: its folder is not there; expected one to write in")
    if not is_replaceable(path) or not os.path.exists(path):
        return
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except OSError as error:
        raise InputError(f"{flag} {where}: {error.strerror}; expected a writable path") from error
    if head and not kind.begins.match(head):
        raise InputError(f"{flag} {where}: already there, and not {kind.name}; expected a new file, or {kind.name}")
