"""Release: check, build twice, install in empty environments, write SBOM and digests; upload with ``--publish``.

    python -m scripts.release                    # everything except the upload; files in dist/
    python -m scripts.release --python 3.11 --python /usr/bin/python3.13 --no-tests
    python -m scripts.release --publish          # also upload, with twine's credentials

Needs git and uv. Two builds of a commit are identical: their timestamps are the commit's.
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
    parser = argparse.ArgumentParser(prog="python -m scripts.release", description="Build, verify, describe, publish.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="output folder (default dist/)")
    parser.add_argument("--python", action="append", help="Python to install on; repeatable (default: this Python)")
    parser.add_argument("--no-tests", action="store_true", help="skip the tests, if they have passed on this commit")
    parser.add_argument("--publish", action="store_true", help="upload to PyPI with twine; needs a tag")
    flags = parser.parse_args(argv)
    problems = list(release_problems(ROOT, VERSION, publish=flags.publish))
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


def release_problems(root: Path, version: str, *, publish: bool) -> Iterator[str]:
    """Yield problems of the working tree: version, changelog, commit."""
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        yield f"CHANGELOG.md: no section [{version}]; expected the entries of [Unreleased] in it"
    if git(root, "status", "--porcelain"):
        yield "the working tree has changes; expected a commit"
    if publish and f"v{version}" not in git(root, "tag", "--points-at", "HEAD").split():
        yield f"HEAD has no tag v{version}; expected git tag v{version}"


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def built_twice(root: Path, out: Path) -> list[Path]:
    """Build sdist and wheel of HEAD twice; return them, in ``out``. Exits if the builds differ."""
    names = ("kvtape", SUMS)
    foreign = [path.name for path in out.iterdir() if not path.name.startswith(names)] if out.exists() else []
    if foreign:
        sys.exit(f"release: --out {out}: contains {foreign[0]}; expected a new folder, or a folder of a release")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        builds = [build(root, Path(folder)) for folder in (first, second)]
        differing = [left.name for left, right in zip(*builds, strict=True) if digest(left) != digest(right)]
        if differing:
            sys.exit(f"release: {', '.join(differing)}: two builds differ; expected identical bytes")
        return [Path(shutil.copy(path, out)) for path in builds[0]]


def build(root: Path, folder: Path) -> list[Path]:
    """Build the sdist of HEAD and the wheel of the sdist, with the commit's timestamps."""
    source, output = folder / "source", folder / "output"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    epoch = git(root, "log", "-1", "--format=%ct")
    # Debug information would contain the build folder.
    settings = {"SOURCE_DATE_EPOCH": epoch, "CFLAGS": f"-g0 -ffile-prefix-map={folder}=."}
    run(["uv", "build", "--quiet", "--sdist", "--out-dir", output, source], **settings)
    [sdist] = output.glob("*.tar.gz")
    even_times(sdist, int(epoch))
    run(["uv", "build", "--quiet", "--wheel", "--out-dir", output, sdist], **settings)
    [wheel] = output.glob("*.whl")
    return [sdist, wheel]


def even_times(sdist: Path, epoch: int) -> None:
    """Rewrite an sdist sorted by name, with one timestamp and no owner; setuptools copies both from files."""
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
    """Install wheel and sdist without extras, each in an empty environment, and run ``--version`` of all commands."""
    for path in files:
        with tempfile.TemporaryDirectory() as folder:
            run(["uv", "venv", "--quiet", "--python", python, folder])
            run(["uv", "pip", "install", "--quiet", "--python", f"{folder}/bin/python", path])
            for command in COMMANDS:
                result = subprocess.run(
                    [f"{folder}/bin/{command}", "--version"],
                    cwd=folder,
                    env=outside(),
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if result.stdout.strip() != f"kvtape {VERSION}":
                    print(result.stderr, end="", file=sys.stderr)
                    sys.exit(f"release: {path.name}: {command} --version: {result.stdout!r}; expected kvtape {VERSION}")
        print(f"{path.name}: installed and run on {python}")


def describe(files: Sequence[Path], out: Path) -> None:
    """Write the SBOM of the wheel with all extras (CycloneDX, with licences), and digests of all files."""
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
    """Return the environment without PYTHONPATH, so that a program cannot import the repository's packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(words: Sequence[str | Path], **settings: str) -> None:
    """Run a program; exits with an error if it fails."""
    result = subprocess.run([*map(str, words)], env=outside() | settings, check=False)
    if result.returncode:
        sys.exit(f"release: {words[0]} {words[1] if len(words) > 1 else ''}: exit code {result.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
