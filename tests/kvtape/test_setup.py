"""``kvtape init``, ``doctor`` and ``completion``: an engine found, a machine checked, words completed."""

import json
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.access import Access
from engines.detection import Recognised
from engines.dialect import Dialect
from engines.facts import read_facts
from engines.llamacpp import LLAMA_CPP
from engines.readiness import Target
from engines.vllm import VLLM
from kvtape.__main__ import main
from kvtape.completion import complete_parser, parser_of
from tracefile.records.errors import InputError


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(path))
    return path


def test_init_writes_a_valid_table_per_command(
    sim_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvtape.toml"
    assert main(["init", "--url", sim_server, "-o", str(file)]) == 0
    assert f"tap --config {file}" in capsys.readouterr().out
    tables = tomllib.loads(file.read_text())
    used = {
        command: vars(parser_of(command).parse_args(["--config", str(file), *words]))
        for command, words in {
            "tap": [],
            "loadgen": [],
            "replay": ["a.jsonl"],
            "sim calibrate": ["a.jsonl"],
            "sim run": ["a.jsonl", "-o", "b.jsonl"],
            "sim what-if": ["a.jsonl"],
            "sim sweep": ["grid.toml", "a.jsonl"],
            "sim search": ["a.jsonl", "--maximize", "rate", "--target", "ttft.p90<=1s"],
            "sim validate": ["a.jsonl"],
            "kvtape doctor": [],
        }.items()
    }
    assert set(tables) == {"tap", "loadgen", "replay", "sim", "kvtape"}
    assert set(tables["sim"]) == {"calibrate", "run", "what-if", "sweep", "search", "validate"}
    assert (used["tap"]["upstream"], used["tap"]["inject"]) == ([sim_server], ["auto"])
    assert (used["loadgen"]["model"], used["replay"]["url"]) == ("kvtape-sim", sim_server)
    assert used["sim run"]["latency_model"] == [Path("model.json")]
    assert (used["sim calibrate"]["output"], used["kvtape doctor"]["url"]) == (Path("model.json"), sim_server)
    with pytest.raises(InputError, match=r"kvtape.toml: exists; expected --overwrite"):
        main(["init", "--url", sim_server, "-o", str(file)])


def states(out: str) -> dict[str, str]:
    return {check[0]: check[1] for check in json.loads(out)["checks"]}


def test_doctor_looks_at_the_machine_and_the_engine(
    sim_server: str, key_file: Path, free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["doctor", "--url", sim_server, "--listen", f"127.0.0.1:{free_port}", "-o", str(tmp_path / "a.jsonl")]
    assert main([*argv, "--json"]) == 0
    result = states(capsys.readouterr().out)
    assert {name for name, state in result.items() if state == "fail"} == set()
    assert [result[name] for name in ("packages", "key file", "port", "engine", "cache", "reset")] == ["ok"] * 6
    assert not key_file.exists()  # a check makes no key


def test_doctor_prints_the_fix_of_each_failure(
    key_file: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file.write_text("no key")
    monkeypatch.setattr("kvtape.doctor.foreign_package", lambda: "tap is imported from /other/tap")
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        assert main(["doctor", "--listen", f"127.0.0.1:{port}", "--url", f"http://127.0.0.1:{free_port}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("fail")]
    assert failed == ["packages", "key", "port", "engine"]
    assert any(line.startswith("packages: expected a separate environment: pipx") for line in lines)
    assert "port: use --listen with a free port" in lines


def check(name: str, capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """State, text and advice of one of doctor's checks."""
    capsys.readouterr()
    main(["doctor", "--json", *argv])
    return next(each[1:] for each in json.loads(capsys.readouterr().out)["checks"] if each[0] == name)


def target(dialect: Dialect, **reported: bool) -> Target:
    return Target("http://h:1", "tiny", Recognised(dialect, ""), read_facts("", "", ""), **reported)


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    ("reported_by_engine", "apart_s", "result"),
    [
        ((0, False, False), None, ("ok", "ns, set by a time server")),
        ((5, False, False), None, ("warning", "ns, not synchronized: traces of several hosts may not align")),
        ((5, False, True), None, ("ok", "ns; synchronization unknown in a container; run timedatectl on the host")),
        ((0, False, False), -90.0, ("warning", "ns, 90 s behind the engine's")),
    ],
)
def test_doctor_checks_the_clock(
    reported_by_engine: tuple[int, bool, bool],
    apart_s: float | None,
    result: tuple[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    kernel, service, container = reported_by_engine
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(adjtimex=lambda buffer: kernel))
    monkeypatch.setattr("kvtape.doctor.SYNCHRONISED_FILE", tmp_path if service else tmp_path / "none")
    monkeypatch.setattr("kvtape.doctor.CONTAINER_FILES", (tmp_path,) if container else ())
    monkeypatch.setattr("kvtape.doctor.CONTAINER_VARIABLES", ())
    monkeypatch.setattr("kvtape.doctor._seconds_ahead", lambda *_: apart_s)
    state, text, _ = check("clock", request.getfixturevalue("capsys"), "--url", "http://127.0.0.1:1")
    assert (state, text.partition(" ")[2]) == result


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    ("name", "ready", "result"),
    [
        ("cache", target(VLLM, reports_cached=True), ["ok", ""]),
        (
            "cache",
            target(VLLM),
            ["warning", "test it with kvtape doctor --probe, two requests; it needs --enable-prompt-tokens-details"],
        ),
        ("reset", target(LLAMA_CPP, has_reset=True), ["ok", ""]),
        ("reset", target(VLLM, has_reset=False), ["warning", "start the engine with VLLM_SERVER_DEV_MODE=1"]),
    ],
)
def test_doctor_checks_cached_tokens_and_cache_reset(
    name: str,
    ready: Target,
    result: list[str],
    sim_server: str,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("monkeypatch").setattr("kvtape.doctor.readiness.inspect_engine", lambda *_: ready)
    assert check(name, request.getfixturevalue("capsys"), "--url", sim_server)[::2] == result


def test_doctor_probes_cached_tokens_with_a_repeated_prompt(
    sim_server: str, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("cache", capsys, "--url", sim_server, "--probe") == [
        "ok",
        "cached tokens are reported: 32 for the repeated prompt",
        "",
    ]
    with pytest.raises(InputError, match=r"--probe: expected --url URL"):
        main(["doctor", "--probe"])


COMPLETED = {
    "kvtape tracef": "tracefile",
    "kvtape sim cur": "curve",
    "kvtape loadgen swe": "sweep",
    "kvtape loadgen --pattern cal": "calibration",
    "kvtape sim pool --num-gpu": "--num-gpu-blocks",
    "kvtape loadgen sweep --prompt-t": "--prompt-tokens",
    "kvtape tracefile info mond": "monday.jsonl",
}
"""Words of a line with the last one cut, and the word that it becomes."""
ASK_BASH = """
source kvtape.bash; COMP_WORDS=($0); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); _shtab_kvtape; echo "${COMPREPLY[@]}"
"""
ASK_FISH = "source kvtape.fish; complete -C $argv[1]"


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a completion script for each shell, and a trace."""
    shtab = pytest.importorskip("shtab")
    folder, parser = tmp_path_factory.mktemp("completion"), complete_parser("kvtape", shtab)
    parser.prog = "kvtape"
    for shell, name in {"bash": "kvtape.bash", "fish": "kvtape.fish", "zsh": "_kvtape"}.items():
        (folder / name).write_text(shtab.complete(parser, shell))
    (folder / "monday.jsonl").touch()
    return folder


@pytest.mark.parametrize(("line", "word"), COMPLETED.items())
def test_bash_completes(line: str, word: str, scripts: Path) -> None:
    asked = ["bash", "-c", ASK_BASH, line]
    assert subprocess.run(asked, cwd=scripts, capture_output=True, text=True, check=True).stdout.split() == [word]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@pytest.mark.parametrize(("line", "word"), list(COMPLETED.items())[3:])
def test_fish_completes(line: str, word: str, scripts: Path) -> None:
    asked = ["fish", "-N", "-c", ASK_FISH, line]
    shown = subprocess.run(asked, cwd=scripts, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[0].split("\t")[0] == word


def test_init_sends_no_key_to_default_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    sent: list[Access] = []

    def refuse(url: str, access: Access) -> str:
        sent.append(access)
        raise InputError("none")

    monkeypatch.setattr("kvtape.init._model", refuse)
    file = str(tmp_path / "kvtape.toml")
    for named in ([], ["--api-key-env", "OPENAI_API_KEY"]):
        with pytest.raises(InputError):
            main(["init", "-o", file, *named])
    assert [bool(access.headers) for access in sent] == [False] * 5 + [True] * 5
