"""Start of the console scripts: another distribution's package in the place of one of ours is named, and ends it."""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtape import __main__, entry


def run_script(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", [f"/venv/bin/{name}", "--version"])
    with pytest.raises(SystemExit) as exited:
        entry.command()
    return exited.value.code


@pytest.mark.parametrize("name", ["kvtape", "tap", "sim.exe"])
def test_script_runs_the_command_of_the_script_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = list[str]()

    def run_command(program: str, main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
        programs.append(program)
        return main(argv)

    monkeypatch.setattr(__main__, "run_command", run_command)
    assert run_script(name, monkeypatch) == 0
    assert (programs, capsys.readouterr().out[:6]) == ([name.removesuffix(".exe")], "kvtape")


@pytest.mark.parametrize(
    "spec",
    [
        SimpleNamespace(submodule_search_locations=["/other/tap"], origin="/other/tap/__init__.py"),
        SimpleNamespace(submodule_search_locations=None, origin="/other/tap.py"),
    ],
)
def test_foreign_tap_is_detected_before_import(
    spec: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "find_spec", lambda package: spec if package == "tap" else find_spec(package))
    assert run_script("tap", monkeypatch) == 2
    location = (spec.submodule_search_locations or [spec.origin])[0]
    assert capsys.readouterr().err == (
        f"tap: error: tap is imported from {location}, not from {Path(entry.__file__).parent.parent}; "
        "expected a separate environment: pipx install kvtape, or uv tool install kvtape\n"
    )
