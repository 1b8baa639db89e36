"""Machine code on disk: in the folders of numba's own cache, by function, kinds of arguments and machine.

Code runs with the rights of the process that loads it. So a file is read only if no other user can have written it, and
a folder used only if no other user can have written into it or moved it; the one beside the source has Python's own
compiled files.

A file is a digest of the rest; a digest of all that the code is made from; the result's kind; the code. A file that is
half written, or of another state, is as good as none, and is replaced as a whole.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

SUFFIX = ".kvo"
FOR_ITS_USER = 0o644
"""Mode of files, whatever the umask. Others may read: an image's kernels run under other users than who made it."""
_DIGEST = hashlib.sha256().digest_size
_KIND = 8
LOCK_LIMIT_S, TOLD_AFTER_S, _LOCK_PAUSE_S = 60.0, 5.0, 0.05


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
        of_source = f"{beside.name}-{hashlib.sha256(str(beside).encode()).hexdigest()[:16]}"
        if named := os.environ.get("NUMBA_CACHE_DIR"):
            yield Path(named) / of_source
        yield self._beside
        with contextlib.suppress(RuntimeError):  # no home
            yield _user_folder() / of_source

    @property
    def _beside(self) -> Path:
        return self.source.parent / "__pycache__"

    def writable_folder(self) -> Path | None:
        """Return the first folder that is trusted and can be written, and make it."""
        return next((folder for folder in self.folders() if _can_write(folder) and self.is_trusted(folder)), None)

    def is_trusted(self, folder: Path) -> bool:
        """Return whether only users whom ``is_safe`` trusts can have written into it, or replaced it by another.

        In a parent that all may write, as /tmp, the sticky bit keeps what is there from others.
        """
        if folder == self._beside:
            return True
        try:
            found, parents = folder.lstat(), {*folder.absolute().parents, *folder.resolve().parents}
            told = [parent.lstat() for parent in parents]
        except (OSError, RuntimeError):  # a loop of links
            return False
        keeps = (self.is_safe(one, stat.S_ISLNK(one.st_mode) or bool(one.st_mode & stat.S_ISVTX)) for one in told)
        return stat.S_ISDIR(found.st_mode) and self.is_safe(found) and all(keeps)

    def is_safe(self, found: os.stat_result, may_be_open: bool = False) -> bool:
        """Return whether it is this process's user's, the administrator's or that of the source's owner, and no other
        user may write it (``may_be_open``: or any may)."""
        is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not may_be_open
        return not is_open and found.st_uid in {0, os.geteuid(), self.source.stat().st_uid}


def place_of(source: Path, function: str, distinct: bytes) -> Place:
    """Return the place of a function's code; ``distinct``: its kinds of arguments and the machine."""
    plain = re.sub(r"[^\w.]+", "-", function)
    told = hashlib.sha256(distinct).hexdigest()[:16]
    return Place(source, f"{source.stem}.{plain}-{sys.implementation.cache_tag}-{told}{SUFFIX}")


def _user_folder() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/numba"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"


def find(place: Place, made_from: bytes) -> MachineCode | None:
    """Return the code made from the same, if a trusted folder has it."""
    trusted = (folder for folder in place.folders() if place.is_trusted(folder))
    return next((made for folder in trusted if (made := read(folder / place.name, made_from, place))), None)


def read(path: Path, made_from: bytes, place: Place) -> MachineCode | None:
    """Return the code in a file if it is whole and made from the same, and no other user can have written it."""
    try:
        with path.open("rb") as file:
            whole = file.read() if place.is_safe(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    digest, rest = whole[:_DIGEST], whole[_DIGEST:]
    if hashlib.sha256(rest).digest() != digest or rest[:_DIGEST] != made_from:
        return None
    return MachineCode(rest[_DIGEST : _DIGEST + _KIND].decode().rstrip(), rest[_DIGEST + _KIND :])


def _can_write(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        for each in (*reversed(folder.parents), folder):
            each.mkdir(0o755, exist_ok=True)  # not for a group, whatever the umask
        return os.access(folder, os.W_OK)
    return False


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Have one process at a time make the code of a file.

    Several make the same where a folder has no locks, where another process keeps one for longer than LOCK_LIMIT_S, and
    where one that held it could not keep the code.
    """
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            if _locked(held.enter_context(open(lock, "ab")), lock):
                held.callback(_remove, lock)  # before it is free: a process that waits for it finds the code
        yield


def _locked(file: BinaryIO, lock: Path) -> bool:
    """Return whether the lock was to be had in LOCK_LIMIT_S."""
    is_told = False
    begun_s = time.monotonic()
    while (waited_s := time.monotonic() - begun_s) <= LOCK_LIMIT_S:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if waited_s > TOLD_AFTER_S and not is_told:
            is_told = True
            print(f"kvtape: waiting for another process to compile machine code ({lock}) …", file=sys.stderr)
        time.sleep(_LOCK_PAUSE_S)
    return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def write(path: Path, made_from: bytes, made: MachineCode) -> None:
    """Keep the code; a full disk, or a folder that is gone, only means that it is made again."""
    rest = made_from + made.result.encode().ljust(_KIND) + made.code
    own = path.with_suffix(f".{os.urandom(8).hex()}")  # no other process has it
    try:
        with open(os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FOR_ITS_USER), "wb") as file:
            file.write(hashlib.sha256(rest).digest() + rest)
        own.replace(path)
    except OSError:
        pass
    finally:
        _remove(own)  # it is there if writing failed, or Ctrl-C ended it
