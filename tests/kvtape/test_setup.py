"""``kvtape init``, ``doctor`` and ``completion``: an engine found, a machine checked, words completed."""

import json
import shutil
import socket
import subprocess
import time
import tomllib
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from engines.access import Access
from engines.dialect import OPENAI
from engines.llamacpp import LLAMA_CPP
from engines.readiness import Readiness
from engines.sglang import SGLANG
from engines.vllm import VLLM
from kvtape.__main__ import main
from kvtape.completion import parser_of, whole_parser
from kvtape.init import config_text
from tracefile.hashing.hashkey import load_key
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
    assert (taken["tap"]["upstream"], taken["tap"]["inject"]) == ([sim_server], ["auto"])
    assert (taken["loadgen"]["model"], taken["replay"]["url"]) == ("kvtape-sim", sim_server)
    assert taken["sim run"]["latency_model"] == [Path("model.json")]
    assert (taken["sim calibrate"]["output"], taken["kvtape doctor"]["url"]) == (Path("model.json"), sim_server)
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
    assert [found[name] for name in ("packages", "key file", "port", "engine", "cache", "reset")] == ["ok"] * 6
    assert not key_file.exists()  # a check makes no key


def test_doctor_fails_with_the_mend_of_each_fault(
    key_file: Path, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key_file.write_text("no key")
    monkeypatch.setattr("kvtape.doctor.foreign_room", lambda: "tap is imported from /other/tap")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["doctor", "--listen", f"127.0.0.1:{port}", "--url", f"http://127.0.0.1:{free_port}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("fail")]
    assert failed == ["packages", "key", "port", "engine"]
    assert any(line.startswith("packages: expected an environment of its own: pipx") for line in lines)
    assert "port: --listen with a free port" in lines


def check(name: str, capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """State, text and advice of one of doctor's checks."""
    capsys.readouterr()
    main(["doctor", "--json", *argv])
    return next(each[1:] for each in json.loads(capsys.readouterr().out)["checks"] if each[0] == name)


def test_doctor_looks_twice_at_a_key_that_others_read_and_a_small_disk(
    key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_key(key_file)
    assert check("key file", capsys)[0] == "ok"
    key_file.chmod(0o644)
    assert check("key file", capsys)[::2] == ["look", f"chmod 600 {key_file}"]
    assert check("disk", capsys, "-o", str(tmp_path))[0] == "ok"
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    assert check("disk", capsys, "-o", str(tmp_path)) == ["look", f"1.0 GiB free at {tmp_path}", "a larger disk"]
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert check("disk", capsys, "-o", str(tmp_path))[::2] == ["fail", "another -o/--output"]


def test_doctor_looks_at_open_files_versions_and_the_clock(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for most, state in ((1024, "look"), (4096, "ok"), (-1, "ok")):
        monkeypatch.setattr("resource.getrlimit", lambda kind, most=most: (most, most))
        assert check("files", capsys)[0] == state
    assert check("versions", capsys)[0] == "ok"


CANNOT_TELL = "ns; cannot tell here if a time server sets it, because {}; on the host run timedatectl"


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    ("told", "apart_s", "found"),
    [
        ((0, False, False), None, ("ok", "ns, set by a time server")),
        ((5, False, False), None, ("look", "ns, set by no time server: hosts' traces may not align")),
        ((5, True, False), None, ("ok", "ns, set by a time server")),
        ((5, False, True), None, ("ok", CANNOT_TELL.format("a container does not see the host's time service"))),
        ((-1, False, False), None, ("ok", CANNOT_TELL.format("the kernel does not say"))),
        ((0, False, False), 1.5, ("ok", "ns, within 3 s of the engine's, set by a time server")),
        ((0, False, False), -90.0, ("look", "ns, 90 s behind the engine's")),
        ((5, False, True), 3600.0, ("look", "ns, 3,600 s ahead of the engine's")),
    ],
)
def test_doctor_judges_the_clock_by_all_that_tells(
    told: tuple[int, bool, bool],
    apart_s: float | None,
    found: tuple[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    kernel, service, container = told
    monkeypatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(adjtimex=lambda buffer: kernel))
    monkeypatch.setattr("kvtape.doctor.SYNCHRONISED_FILE", tmp_path if service else tmp_path / "none")
    monkeypatch.setattr("kvtape.doctor.CONTAINER_FILES", (tmp_path,) if container else ())
    monkeypatch.setattr("kvtape.doctor.CONTAINER_VARIABLES", ())
    monkeypatch.setattr("kvtape.doctor._seconds_ahead", lambda *_: apart_s)
    state, text, _ = check("clock", request.getfixturevalue("capsys"), "--url", "http://127.0.0.1:1")
    assert (state, text.partition(" ")[2]) == found


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize("status", [200, 404])
def test_the_engines_clock_is_read_from_its_first_response(
    status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every uvicorn sends it; ``sim serve`` sends none."""
    asked = []

    class Dated(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response_only(status)
            self.send_header("Date", formatdate(1_000_000_000, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Dated) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        clock = SimpleNamespace(time=lambda: 1_000_000_060.5, get_clock_info=time.get_clock_info)
        monkeypatch.setattr("kvtape.doctor.time", clock)
        _, told, _ = check("clock", capsys, "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert told.endswith("ns, 60 s ahead of the engine's")
    assert asked.count("/v1/models") == 1


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    ("name", "ready", "found"),
    [
        ("cache", Readiness(VLLM, reports_cached=True), ["ok", ""]),
        (
            "cache",
            Readiness(VLLM),
            ["look", "kvtape doctor --probe tries it with two requests; it needs --enable-prompt-tokens-details"],
        ),
        ("cache", Readiness(SGLANG, reports_cached=False), ["look", "start it with --enable-cache-report"]),
        ("cache", Readiness(VLLM, caches_prefixes=False), ["look", "start it with prefix caching"]),
        ("cache", Readiness(OPENAI), ["look", "kvtape doctor --probe tries it with two requests"]),
        ("reset", Readiness(LLAMA_CPP, has_reset=True), ["ok", ""]),
        ("reset", Readiness(VLLM, has_reset=False), ["look", "start it with VLLM_SERVER_DEV_MODE=1"]),
        ("reset", Readiness(OPENAI), ["look", "restart it between runs"]),
    ],
)
def test_doctor_tells_of_cached_tokens_and_the_reset(
    name: str,
    ready: Readiness,
    found: list[str],
    sim_server: str,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("monkeypatch").setattr("kvtape.doctor.readiness.readiness_of", lambda *_: ready)
    assert check(name, request.getfixturevalue("capsys"), "--url", sim_server)[::2] == found


def test_doctor_probes_cached_tokens_by_the_same_prompt_again(
    sim_server: str, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("cache", capsys, "--url", sim_server, "--probe") == [
        "ok",
        "cached tokens are reported: 32 of the same prompt again",
        "",
    ]
    with pytest.raises(InputError, match=r"--probe: expected --url URL"):
        main(["doctor", "--probe"])


@pytest.mark.usefixtures("key_file")
@pytest.mark.parametrize(
    ("cached", "found"),
    [
        (None, ["look", "start it with --enable-prompt-tokens-details"]),
        (0, ["look", "start it with prefix caching"]),
        (InputError("--probe: HTTP 400"), ["look", "a model that takes prompts of token ids at /v1/completions"]),
    ],
)
def test_doctor_tells_of_a_probe_that_hit_nothing(
    cached: int | InputError | None,
    found: list[str],
    sim_server: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def probed(*_: object) -> int | None:
        if isinstance(cached, InputError):
            raise cached
        return cached

    monkeypatch.setattr("kvtape.doctor.control.probed_cached_tokens", probed)
    assert check("cache", capsys, "--url", sim_server, "--probe")[::2] == found


def test_doctor_tells_of_an_engine_at_work(
    sim_server: str, key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvtape.doctor.readiness.readiness_of", lambda *_: Readiness(VLLM, running=2))
    main(["doctor", "--url", sim_server])
    assert "look engine    the engine is not idle: 2 requests running" in capsys.readouterr().out


def test_doctor_refuses_a_wrong_address(key_file: Path) -> None:
    with pytest.raises(InputError, match=r"--listen: 'here': expected HOST:PORT"):
        main(["doctor", "--listen", "here"])


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
ASK_ZSH = """
zmodload zsh/zpty; zpty shell zsh -f -i
zpty -w shell 'fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; PROMPT=rea""dy'
zpty -r shell shown '*ready*'
zpty -w -n shell $1$'\\t'; zpty -r shell shown "*$2*"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a completion script for each shell, and a trace."""
    shtab = pytest.importorskip("shtab")
    folder, parser = tmp_path_factory.mktemp("completion"), whole_parser("kvtape", shtab)
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


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes(scripts: Path) -> None:
    """A whole interactive shell: one word; it waits for the word, or until the time is out."""
    line, word = "kvtape loadgen --pattern cal", "calibration"
    subprocess.run(["zsh", "-f", "-c", ASK_ZSH, "ask", line, word], cwd=scripts, check=True, timeout=60)


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
