"""Files that survive a power cut: what was written is on the disk, and so is the name it was given."""

import contextlib
import os
import stat
from pathlib import Path


def aside_of(path: Path) -> Path:
    """Return where a file is written until it is whole: ``.NAME.PID.partial`` beside it."""
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")


def replace_durably(path: Path, content: bytes) -> None:
    """Put ``content`` in place of the file: readers see the old one or the new one, whatever happens meanwhile."""
    aside = aside_of(path)
    try:
        with open(aside, "wb") as file:
            keep_mode(path, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def keep_mode(path: Path, replacement: int | Path) -> None:
    """Give a file, by path or descriptor, the permissions of the file that it is to replace, if there is one."""
    with contextlib.suppress(OSError):
        os.chmod(replacement, stat.S_IMODE(os.stat(path).st_mode))


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file whose content is on the disk, and make the new name last."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
