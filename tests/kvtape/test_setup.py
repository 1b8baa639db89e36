"""``kvtape init``, ``doctor`` and ``completion``: an engine found, a machine checked, words completed."""

import importlib.util
import json
import socket
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from engines.access import Access
from kvtape.__main__ import main
from kvtape.init import config_text
from kvtape.parsers import parser_of
from tracefile.records.errors import InputError


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "key"
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(path))
    return path


def test_init_writes_a_table_for_each_command_which_it_takes(
    sim_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvtape.toml"
    assert main(["init", "--url", sim_server, "-o", str(file)]) == 0
    assert f"tap --config {file}" in capsys.readouterr().out
    tables = tomllib.loads(file.read_text())
    taken = {
        command: vars(parser_of(command).parse_args(["--config", str(file), *words]))
        for command, words in {
            "tap": [],
            "loadgen": [],
            "replay": ["a.jsonl"],
            "sim run": ["a.jsonl", "-o", "b.jsonl"],
            "sim what-if": ["a.jsonl"],
            "sim validate": ["a.jsonl"],
        }.items()
    }
    assert set(tables) == {"tap", "loadgen", "replay", "sim"}
    assert set(tables["sim"]) == {"run", "what-if", "validate"}
    assert taken["tap"]["upstream"] == [sim_server]
    assert (taken["loadgen"]["model"], taken["replay"]["url"]) == ("kvtape-sim", sim_server)
    assert taken["sim run"]["latency_model"] == [Path("model.json")]
    with pytest.raises(InputError, match=r"kvtape.toml: exists; expected --overwrite"):
        main(["init", "--url", sim_server, "-o", str(file)])


def test_init_without_an_engine_names_where_it_looked(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtape.init.PORTS", (free_port,))
    with pytest.raises(InputError, match=r"no engine at 127.0.0.1, ports \d+; expected --url URL"):
        main(["init", "-o", str(tmp_path / "kvtape.toml")])
    assert not (tmp_path / "kvtape.toml").exists()


def states(out: str) -> dict[str, str]:
    return {check[0]: check[1] for check in json.loads(out)["checks"]}


def test_doctor_looks_at_the_machine_and_the_engine(
    sim_server: str, key_file: Path, free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["doctor", "--url", sim_server, "--listen", f"127.0.0.1:{free_port}", "-o", str(tmp_path / "a.jsonl")]
    assert main([*argv, "--json"]) == 0
    found = states(capsys.readouterr().out)
    assert {name for name, state in found.items() if state == "fail"} == set()
    assert [found[name] for name in ("packages", "key file", "port", "engine")] == ["ok"] * 4
    assert not key_file.exists()  # a check makes no key


def test_doctor_fails_with_the_mend_of_each_fault(
    key_file: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file.write_text("no key")
    (tmp_path / "elsewhere").mkdir()
    find = importlib.util.find_spec
    other = SimpleNamespace(submodule_search_locations=[str(tmp_path / "elsewhere" / "tap")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: other if name == "tap" else find(name))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", "--listen", f"127.0.0.1:{port}", "--url", f"http://127.0.0.1:{free_port}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("fail")]
    assert failed == ["packages", "key", "port", "engine"]
    assert "packages: pipx install kvtape" in lines
    assert "port: --listen with a free port" in lines


def test_doctor_refuses_a_wrong_address(key_file: Path) -> None:
    with pytest.raises(InputError, match=r"--listen: 'here': expected HOST:PORT"):
        main(["doctor", "--listen", "here"])


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["kvtape", "tracef"], "tracefile"),
        (["kvtape", "sim", "cur"], "curve"),
        (["kvtape", "loadgen", "selft"], "selftest"),
        (["kvtape", "loadgen", "--pattern", "cal"], "calibration"),
        (["kvtape", "sim", "pool", "--num-gpu"], "--num-gpu-blocks"),
    ],
)
def test_bash_completes(words: list[str], completed: str, bash_script: Path) -> None:
    asked = ["bash", "-c", ASK, str(bash_script), *words]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [completed]


ASK = """
source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _shtab_kvtape; echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shtab = pytest.importorskip("shtab")
    from kvtape.completion import whole_parser

    parser = whole_parser("kvtape", shtab)
    parser.prog = "kvtape"
    path = tmp_path_factory.mktemp("completion") / "kvtape.bash"
    path.write_text(shtab.complete(parser, "bash"))
    return path


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_a_script_names_the_flags_of_a_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell, "--for", "tracefile"]) == 0
    script = capsys.readouterr().out
    assert "tracefile" in script
    assert "overwrite" in script


def test_init_writes_its_own_keys_and_tls_and_any_model_name() -> None:
    access = {"api-key-env": "GPU_KEY", "header-env": ["X-Key=OTHER"], "ca": "/etc/ca.pem"}
    tables = tomllib.loads(config_text("https://gpu", "modèle 🦙", "an engine", access))
    assert tables["replay"] == {"url": "https://gpu", "model": "modèle 🦙", **access}
    assert {name for name in tables["tap"] if name in access} == set(access)
    assert {name for name in tables["loadgen"] if name in access} == {"api-key-env", "header-env"}


def test_init_sends_no_key_to_ports_that_nobody_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
