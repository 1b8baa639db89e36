"""Files that survive a power cut: what was written is on the disk, and so is the name it was given."""

import contextlib
import os
import stat
from pathlib import Path


class Replacement:
    """A file beside ``path``, with its permissions, that takes its name once it is whole."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """``mode``: permissions where no file is at ``path`` yet, less the umask."""
        self.path = path
        self.aside = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
        self.aside.unlink(missing_ok=True)
        file = os.open(self.aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # never through a link
        with contextlib.suppress(OSError):
            before = path.lstat().st_mode
            if stat.S_ISREG(before):
                os.chmod(file, stat.S_IMODE(before))
        os.close(file)

    def take_name(self) -> None:
        rename_durably(self.aside, self.path)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.aside.unlink()


def replace_durably(path: Path, content: bytes) -> None:
    """Put ``content`` in place of the file: readers see the old one or the new one, whatever happens meanwhile."""
    new = Replacement(path)
    try:
        with open(new.aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.take_name()
    except BaseException:
        new.abandon()
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file whose content is on the disk, and make the new name last."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
