"""Folder of a tap's sockets and shared files: held by a lock while the tap lives, so that a later one can remove it."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tap.supervisor.config import Runtime
from tracefile.records.errors import InputError

PREFIX = "kvtap-"
MAX_SOCKET_PATH = 103
"""Bytes of a ``sockaddr_un`` path on every system."""
LEAST_AGE_S = 60.0
"""A younger folder may be a starting tap's, which has no lock yet."""


@contextlib.contextmanager
def runtime_folder() -> Iterator[Runtime]:
    """Remove the folders that killed taps have left, and make one for the length of the block."""
    try:
        remove_left(Path(tempfile.gettempdir()))
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
    except OSError as error:
        raise InputError(f"no folder for temporary files ({error.strerror}); expected a writable $TMPDIR") from None
    with folder as path, _held(path):
        runtime = Runtime(Path(path))
        if len(runtime.recorder_socket) > MAX_SOCKET_PATH:
            raise InputError(f"{path}: too long a path for sockets; expected a shorter $TMPDIR")
        yield runtime


def remove_left(parent: Path) -> None:
    """Remove this user's runtime folders that no tap holds; one with other files than a tap's stays."""
    for path in parent.glob(f"{PREFIX}*"):
        # Gone meanwhile, another user's, or held by its tap.
        with contextlib.suppress(OSError), _held(path) as folder:
            about = os.fstat(folder)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > LEAST_AGE_S:
                _remove(Runtime(path), folder)


def _remove(left: Runtime, folder: int) -> None:
    own = (left.recorder_socket, left.admin_socket, left.counts, left.board)
    for path in own:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.basename(path), dir_fd=folder)
    left.folder.rmdir()


@contextlib.contextmanager
def _held(path: str | Path) -> Iterator[int]:
    """Lock a folder, and give its descriptor; raises BlockingIOError where another process has it locked."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(folder)
