"""Machine code on disk: in the folders of numba's own cache, by function, kinds of arguments and machine.

A file is a digest of the rest; a digest of all that the code is made from; the result's kind; the code. A file that is
half written, or of another state, is as good as none, and is replaced as a whole.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".kvo"
_DIGEST = hashlib.sha256().digest_size
_KIND = 8


class MachineCode(NamedTuple):
    """Code of an entry."""

    result: str
    """Type of the result: ``none``, or numba's name of it."""
    code: bytes
    """An object file of this machine."""


class Place(NamedTuple):
    """A function with its kinds of arguments, on one machine."""

    source: Path
    """File of the function."""
    name: str

    def folders(self) -> Iterator[Path]:
        """Yield folders that may hold the code, the preferred one first."""
        beside = self.source.parent
        of_source = f"{beside.name}_{hashlib.sha256(str(beside).encode()).hexdigest()[:16]}"
        if named := os.environ.get("NUMBA_CACHE_DIR"):
            yield Path(named) / of_source
        yield beside / "__pycache__"
        with contextlib.suppress(RuntimeError):  # no home
            yield _user_folder() / of_source


def place_of(source: Path, function: str, distinct: bytes) -> Place:
    """Return the place of a function's code; ``distinct``: of codes that are kept beside each other."""
    plain = re.sub(r"[^\w.]+", "-", function)
    told = hashlib.sha256(distinct).hexdigest()[:16]
    return Place(source, f"{source.stem}.{plain}-{sys.implementation.cache_tag}-{told}{SUFFIX}")


def _user_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/numba"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def find(place: Place, made_from: bytes) -> tuple[MachineCode | None, Path | None]:
    """Return the code made from the same, if it is in the first folder that can be written or in one before it, and
    that folder, if there is one."""
    for folder in place.folders():
        if made := read(folder / place.name, made_from):
            return made, folder
        if _can_write(folder):
            return None, folder
    return None, None


def read(path: Path, made_from: bytes) -> MachineCode | None:
    """Return the code in a file if it is whole and made from the same."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    digest, rest = whole[:_DIGEST], whole[_DIGEST:]
    if hashlib.sha256(rest).digest() != digest or rest[:_DIGEST] != made_from:
        return None
    return MachineCode(rest[_DIGEST : _DIGEST + _KIND].decode().rstrip(), rest[_DIGEST + _KIND :])


def _can_write(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    return False


@contextlib.contextmanager
def alone(path: Path) -> Iterator[Path]:
    """Have one process at a time make the code of a file; where a folder has no locks, several make the same."""
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held.enter_context(open(lock, "ab")), fcntl.LOCK_EX)
            # Gone before it is free: a process that waits for it finds the code.
            held.callback(lock.unlink, missing_ok=True)
        yield path


def write(path: Path, made_from: bytes, made: MachineCode) -> None:
    """Keep the code; a full disk, or a folder that is gone, only means that it is made again."""
    rest = made_from + made.result.encode().ljust(_KIND) + made.code
    own = path.with_suffix(f".{os.urandom(8).hex()}")  # no other process has it
    try:
        own.write_bytes(hashlib.sha256(rest).digest() + rest)
        own.replace(path)
    except OSError:
        own.unlink(missing_ok=True)
