"""Parts of a release: reasons against it, an sdist without the build's times."""

import gzip
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from scripts.release import even_times, release_problems


def sdist(path: Path, time_s: int, names: list[str]) -> Path:
    with gzip.GzipFile(path, "wb", mtime=time_s) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.mode = len(name), time_s, f"user{time_s}", 0o664
            archive.addfile(member, io.BytesIO(name.encode()))
    return path


def test_two_sdists_of_the_same_files_have_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [
        sdist(tmp_path / "a" / "k.tar.gz", 5, ["k/setup.py", "k/README.md"]),
        sdist(tmp_path / "b" / "k.tar.gz", 9, ["k/README.md", "k/setup.py"]),
    ]
    for path in paths:
        even_times(path, 1_700_000_000)
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}) == 1
    with tarfile.open(paths[0]) as archive:
        members = [(member.name, member.mtime, member.uname, member.mode) for member in archive.getmembers()]
        content = archive.extractfile("k/README.md")
        assert content is not None
        assert content.read() == b"k/README.md"
    assert members == [("k/README.md", 1_700_000_000, "", 0o644), ("k/setup.py", 1_700_000_000, "", 0o644)]


def test_release_needs_a_changelog_section_a_commit_and_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "n")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "e")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    assert list(release_problems(tmp_path, "1.2.0", publish=False)) == [
        "CHANGELOG.md: no section [1.2.0]; expected the entries of [Unreleased] in it",
        "the working tree has changes; expected a commit",
    ]
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.0] - 2026-11-23\n")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "-q", "-m", "x"], cwd=tmp_path, check=True)
    assert not list(release_problems(tmp_path, "1.2.0", publish=False))
    assert list(release_problems(tmp_path, "1.2.0", publish=True)) == [
        "HEAD has no tag v1.2.0; expected git tag v1.2.0"
    ]
    subprocess.run(["git", "tag", "v1.2.0"], cwd=tmp_path, check=True)
    assert not list(release_problems(tmp_path, "1.2.0", publish=True))
