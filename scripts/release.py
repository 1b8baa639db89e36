"""A release: checked, built twice, installed in empty environments, described, and, with ``--publish``, uploaded.

    python -m scripts.release                    # all but the upload; the files are in dist/
    python -m scripts.release --python 3.11 --python /usr/bin/python3.13 --no-tests
    python -m scripts.release --publish          # and upload them with twine's credentials

Needs git, and uv for its environments. Two builds of a commit have the same bytes: times in them are the commit's.
"""

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtape.completion import PROGRAMS
from tracefile.commandline.parser import VERSION

ROOT: Final = Path(__file__).parent.parent
COMMANDS: Final = ("kvtape", *PROGRAMS)
SBOM: Final = "kvtape.cdx.json"
SUMS: Final = "SHA256SUMS"


def main(argv: Sequence[str]) -> int:
    """Make a release as the flags say."""
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description="Build, verify, describe, publish.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (default dist/)")
    parser.add_argument("--python", action="append", help="Python to install on, again for more (default: this one)")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out: they have passed on this commit")
    parser.add_argument("--publish", action="store_true", help="upload to PyPI with twine; refused without a tag")
    flags = parser.parse_args(argv)
    problems = list(found_problems(ROOT, VERSION, publish=flags.publish))
    for problem in problems:
        print(f"release: {problem}", file=sys.stderr)
    if problems and flags.publish:
        return 1
    if not flags.no_tests:
        run([ROOT / "scripts" / "check"], PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        run(["make", "-C", ROOT, "test-docs"])
    files = built_twice(ROOT, flags.out)
    for python in flags.python or [sys.executable]:
        verify(files, python)
    describe(files, flags.out)
    if flags.publish:
        run(["uvx", "twine", "upload", *files])
    print(f"{flags.out}: " + ", ".join(path.name for path in sorted(flags.out.iterdir())))
    return 1 if problems else 0


def found_problems(root: Path, version: str, *, publish: bool) -> Iterator[str]:
    """Give reasons against a release of the working tree: its version, its changelog, its commit."""
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        yield f"CHANGELOG.md: no section [{version}]; expected one, with what [Unreleased] lists"
    if git(root, "status", "--porcelain"):
        yield "the working tree has changes; expected a commit"
    if publish and f"v{version}" not in git(root, "tag", "--points-at", "HEAD").split():
        yield f"HEAD has no tag v{version}; expected git tag v{version}"


def git(root: Path, *words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def built_twice(root: Path, out: Path) -> list[Path]:
    """Build sdist and wheel of HEAD in two folders; return them, in ``out``. Exits if their bytes differ."""
    ours = ("kvtape", SUMS)
    others = [path.name for path in out.iterdir() if not path.name.startswith(ours)] if out.exists() else []
    if others:
        sys.exit(f"release: --out {out}: has {others[0]}; expected no folder, or that of an earlier release")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        once, again = (build(root, Path(folder)) for folder in (first, second))
        differing = [one.name for one, other in zip(once, again, strict=True) if digest(one) != digest(other)]
        if differing:
            sys.exit(f"release: {', '.join(differing)}: two builds differ; expected the same bytes")
        return [Path(shutil.copy(path, out)) for path in once]


def build(root: Path, folder: Path) -> list[Path]:
    """Build the sdist of HEAD and the wheel of that sdist; times in both are the commit's."""
    source, made = folder / "source", folder / "made"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    epoch = git(root, "log", "-1", "--format=%ct")
    # A debugger's paths would name the build's folder.
    settings = {"SOURCE_DATE_EPOCH": epoch, "CFLAGS": f"-g0 -ffile-prefix-map={folder}=."}
    run(["uv", "build", "--quiet", "--sdist", "--out-dir", made, source], **settings)
    [sdist] = made.glob("*.tar.gz")
    even_times(sdist, int(epoch))
    run(["uv", "build", "--quiet", "--wheel", "--out-dir", made, sdist], **settings)
    [wheel] = made.glob("*.whl")
    return [sdist, wheel]


def even_times(sdist: Path, epoch: int) -> None:
    """Write an sdist anew, by name, with one time and no owner: setuptools keeps those of the files."""
    with tarfile.open(sdist) as old:
        members = sorted(old.getmembers(), key=lambda member: member.name)
        contents = {member.name: old.extractfile(member) for member in members if member.isfile()}
        with (
            open(sdist.with_suffix(".new"), "wb") as raw,
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member in members:
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, contents.get(member.name))
    sdist.with_suffix(".new").replace(sdist)


def verify(files: Sequence[Path], python: str) -> None:
    """Install wheel and sdist without an extra, each in an empty environment; every command must tell its version."""
    for path in files:
        with tempfile.TemporaryDirectory() as folder:
            run(["uv", "venv", "--quiet", "--python", python, folder])
            run(["uv", "pip", "install", "--quiet", "--python", f"{folder}/bin/python", path])
            for command in COMMANDS:
                told = subprocess.run(
                    [f"{folder}/bin/{command}", "--version"],
                    cwd=folder,
                    env=outside(),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if told.stdout.strip() != f"kvtape {VERSION}":
                    print(told.stderr, end="", file=sys.stderr)
                    sys.exit(f"release: {path.name}: {command} --version: {told.stdout!r}; expected kvtape {VERSION}")
        print(f"{path.name}: installed and run on {python}")


def describe(files: Sequence[Path], out: Path) -> None:
    """Write what the wheel with all extras installs, with its licences (CycloneDX), and digests of every file."""
    [wheel] = [path for path in files if path.suffix == ".whl"]
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        run(["uv", "venv", "--quiet", folder])
        run(["uv", "pip", "install", "--quiet", "--python", python, f"kvtape[all] @ {wheel.resolve().as_uri()}"])
        tool: list[str | Path] = ["uvx", "--from", "cyclonedx-bom", "cyclonedx-py", "environment", python]
        settings: list[str | Path] = [
            "--pyproject",
            ROOT / "pyproject.toml",
            "--output-reproducible",
            "--output-format",
            "JSON",
        ]
        run([*tool, *settings, "--output-file", out / SBOM])
    described = sorted(path for path in out.iterdir() if path.name != SUMS)
    (out / SUMS).write_text("".join(f"{digest(path)}  {path.name}\n" for path in described))


def outside() -> dict[str, str]:
    """Return the environment without what would let a program import the repository's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(words: Sequence[str | Path], **settings: str) -> None:
    """Run a program; exits with its code if it fails."""
    done = subprocess.run([*map(str, words)], env=outside() | settings, check=False)
    if done.returncode:
        sys.exit(f"release: {words[0]} {words[1] if len(words) > 1 else ''}: exit code {done.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
