"""Permissions of created files (``--file-mode``) and folders."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tap.__main__ import umask_of


@pytest.mark.parametrize("file_mode", [0o600, 0o640, 0o644])
def test_file_mode_and_folder_permissions(file_mode: int, tmp_path: Path) -> None:
    before = os.umask(umask_of(file_mode))
    try:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "counts").touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "counts").stat().st_mode) == file_mode
