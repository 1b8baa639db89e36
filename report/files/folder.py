"""A folder of files, written beside its place and renamed: whole or not at all, and over nothing but its own like."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from report.files import evalscope, tables, timeline, veeksha
from report.files.measured import Lacking, Measured, Writer
from tracefile.records.errors import InputError

FILES: dict[str, Writer] = {**tables.FILES, **timeline.FILES, **evalscope.FILES, **veeksha.FILES}
"""Writers by file name."""


def check_folder(folder: Path, trace: Path, *, overwrite: bool) -> None:
    """Raise InputError unless the folder is new or empty, or may be replaced and holds no other file."""
    where = f"--files {folder}"
    if not folder.resolve().parent.is_dir():
        raise InputError(f"{where}: its folder is not there; expected one to write in")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{where}: is a file; expected a folder")
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    if files and not overwrite:
        raise InputError(f"{where}: not empty; expected a new folder, or --overwrite")
    if trace.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{where}: holds the trace {trace}; expected another folder")
    for path in files:
        name = path.relative_to(folder).as_posix()
        if name not in FILES:
            raise InputError(f"{where}: holds {name}, which is none of its files; expected another folder")


def write_files(folder: Path, measured: Measured) -> list[str]:
    """Write every file that the trace has the facts for; say the others."""
    left_out: dict[str, str] = {}
    with _whole(folder) as new:
        for name, write in FILES.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write(measured, path)
            except Lacking as lacking:
                path.unlink(missing_ok=True)
                left_out[name] = str(lacking)
    return _told_of(left_out)


def _told_of(left_out: Mapping[str, str]) -> list[str]:
    """Return a line a file, or one for all files of a kind in a folder that the same reason leaves out."""
    kinds = [f"{Path(name).parent}/*{Path(name).suffix}" for name in FILES]
    said = {}
    for name, reason in left_out.items():
        kind = f"{Path(name).parent}/*{Path(name).suffix}"
        alike = [one for one, why in left_out.items() if why == reason and Path(one).match(kind)]
        said[kind if len(alike) == kinds.count(kind) > 1 else name] = reason
    return [f"{name} left out: {reason}" for name, reason in said.items()]


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Give a folder beside ``folder`` to write in; it takes the name at the end, or is removed with all in it."""
    place = folder.resolve()
    new, old = (place.with_name(f".{place.name[:200]}.{os.getpid()}.{word}") for word in ("partial", "replaced"))
    try:
        new.mkdir()
        yield new
        if place.exists():
            place.rename(old)
        new.rename(place)
    except OSError as error:
        raise InputError(f"--files {folder}: {error.strerror or error}; expected a writable folder") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
