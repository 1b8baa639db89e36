"""Files that survive a power cut: what was written is on the disk, and so is the name it was given."""

import contextlib
import os
from pathlib import Path


def replace_durably(path: Path, content: bytes) -> None:
    """Put ``content`` in place of the file: readers see the old one or the new one, whatever happens meanwhile."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file whose content is on the disk, and make the new name last."""
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
