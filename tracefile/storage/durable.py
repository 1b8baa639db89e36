"""Durable files: content and name survive a power cut."""

import contextlib
import os
import stat
from pathlib import Path


class Replacement:
    """Temporary file beside ``path``, with its permissions, that is renamed to ``path`` when complete."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """``mode``: permissions of a new file, less the umask."""
        self.path = path
        self.aside = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
        self.aside.unlink(missing_ok=True)
        file = os.open(self.aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # never follows a link
        with contextlib.suppress(OSError):
            before = path.lstat().st_mode
            if stat.S_ISREG(before):
                os.chmod(file, stat.S_IMODE(before))
        os.close(file)

    def commit(self) -> None:
        rename_durably(self.aside, self.path)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.aside.unlink()


def replace_durably(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically: readers see the old or the new content."""
    new = Replacement(path)
    try:
        with open(new.aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.commit()
    except BaseException:
        new.abandon()
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file whose content is on disk, and sync the folder."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
