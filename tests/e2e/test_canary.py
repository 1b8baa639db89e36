"""Secrets and content are nowhere but on the wire: a capture, a load, a replay and reports, all of them searched.

Each key, header, cookie, prompt, output and error body has one mark in it. Searched are every file that is written, all
printed lines, and the arguments of every process of this machine. A process's environment holds the keys by right.
"""

import contextlib
import json
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
import zstandard

from loadgen.__main__ import main as loadgen
from replay.__main__ import main as replay
from report.__main__ import main as report
from sim.__main__ import main as sim
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.vocabularies import write_model
from tracefile.__main__ import main as tracefile
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

MARK = "KANARIE"
SECRETS = {"OPENAI_API_KEY": f"{MARK}-key", "GATE": f"{MARK}-gate", "COOKIE": f"id={MARK}-cookie"}
LOAD = ("--parallel", "2", "--output-tokens", "2")


@pytest.fixture
def authority(tmp_path: Path) -> trustme.CA:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return authority


@pytest.fixture
def engine(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedEngine]:
    """An engine behind TLS, a key and a path, with a mark in all that it says; two requests fail, one is cut."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    engine = ScriptedEngine(tls=tls, authorization=f"Bearer {SECRETS['OPENAI_API_KEY']}", base_path="/team-a")
    engine.prints, engine.statuses, engine.cuts = MARK, {1: 500, 9: 429}, {2}
    with engine.serving():
        yield engine


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of all that the run writes; inputs and keys lie beside it."""
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # a setting of its own: a warm process has another's arguments
    rows = [[{"role": "user", "content": f"{MARK} prompt {number}"}] for number in range(4)]
    write_model("deepseek", tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


@contextlib.contextmanager
def running_tap(engine: ScriptedEngine, out: Path) -> Iterator[str]:
    """A tap before the engine; all that it prints is in a file of ``out``."""
    flags = ("--upstream", f"{engine.url}/team-a", "--ca", "../ca.pem", "--listen", "127.0.0.1:0", "--admin")
    more = ("127.0.0.1:0", "--tokenizer", "../model", "--keep-header", "X-Team")
    with (out / "tap.log").open("wb") as log:
        command = [sys.executable, "-m", "tap", *flags, *more, "-o", "tap.jsonl.zst"]
        tap = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert tap.stdout is not None
        first = tap.stdout.readline()
        result = re.search(rb"http://127\.0\.0\.1:\d+", first)
        assert result, (first, (out / "tap.log").read_text())
        yield result[0].decode()
        tap.send_signal(signal.SIGTERM)
        log.write(first + tap.communicate(timeout=60)[0])
    assert tap.returncode == 0


WATCHER = """
import os, select, sys
shown, reads = set(), {}
while not select.select([sys.stdin], [], [], 0.02)[0]:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        reads[pid] = reads.get(pid, 0) + 1
        if reads[pid] < 50:
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    shown.add(file.read())
            except OSError:
                pass
sys.stdout.buffer.write(b"\\n".join(shown))
"""
"""Reads every process's arguments until its input ends; a sender lives for 0.2 s, in which a thread would starve."""


@contextlib.contextmanager
def arguments_watched(shown: set[bytes]) -> Iterator[None]:
    """Collect the arguments of every process of this machine for as long as the block lasts."""
    with subprocess.Popen(
        [sys.executable, "-SE", "-c", WATCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as item:
        try:
            yield
        finally:
            shown |= set(item.communicate()[0].split(b"\n"))


def opened(path: Path) -> bytes:
    """A file as its reader sees it: unpacked."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return data


def run(command: Callable[[list[str]], int], *arguments: str, code: int = 0) -> None:
    assert command([*arguments]) == code, arguments


def test_no_secret_and_no_content_is_left_behind(
    engine: ScriptedEngine, out: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = ("--header-env", "X-Gate=GATE", "--header-env", "Cookie=COOKIE", "--header", "X-Team: blue")
    shown: set[bytes] = set()
    with arguments_watched(shown), running_tap(engine, out) as url:
        there = ("--url", f"{url}/v1", *secrets)
        chats = ("--api", "chat", "--dataset", "messages:../chats.jsonl", "--number", "4", "--tokenizer", "none")
        run(loadgen, *there, "-o", "chats.jsonl", *LOAD, *chats)
        run(loadgen, *there, "-o", "load.jsonl.zst", *LOAD, "--number", "3", "--prompt-tokens", "40")
        run(replay, "load.jsonl.zst", *there, "-o", "replayed.jsonl", "--reset-cache", "--json")
        monkeypatch.setenv("OPENAI_API_KEY", f"{MARK}-wrong")
        with pytest.raises(InputError) as refused:
            run(loadgen, *there, "-o", "none.jsonl", *LOAD, "--number", "3")
    assert "key that was sent" in str(refused.value)
    run(report, "compare", "a=load.jsonl.zst", "b=replayed.jsonl", "--html", "page.html", "--bootstrap", "20")
    run(tracefile, "info", "tap.jsonl.zst")
    run(sim, "curve", "tap.jsonl.zst")
    assert {(record.status, record.error) for record in load_trace("tap.jsonl.zst")[1]} >= {
        ("ok", None),
        ("error", "http_500"),
        ("error", "http_429"),
        ("upstream_abort", "upstream_closed"),
    }
    assert all(f"{MARK}-gate" == headers["x-gate"] for headers in engine.headers), "they were on the wire"
    control = {"/metrics", "/reset_prefix_cache", "/v1/models", "/version"}
    assert {path.split(" /team-a")[1] for path in engine.paths} >= control
    assert sum(MARK in json.dumps(body) for body in engine.seen) == 4
    written = capfd.readouterr()
    positions = {str(path): opened(path) for path in out.rglob("*") if path.is_file()}
    assert {"tap.jsonl.zst", "tap.log", "page.html"} <= {Path(position).name for position in positions}
    assert b"blue" in positions[str(out / "tap.jsonl.zst")], "as was asked for"
    ran = {word for line in shown for word in line.split(b"\0")}
    assert {b"loadgen.runs.worker", b"tap.recorder.recorder", b"tap.proxy.worker"} <= ran
    positions |= {"stdout": written.out.encode(), "stderr": written.err.encode()}
    positions |= {"an error": str(refused.value).encode()}
    positions |= {"a file's name": repr(list(positions)).encode(), "arguments": b"\n".join(shown)}
    for position, result in positions.items():
        where = result.upper().find(MARK.encode())
        assert where < 0, f"{position} has {result[max(0, where - 80) : where + 20]!r}"
    key = (out.parent / "key").read_bytes().strip()
    assert not [position for position, result in positions.items() if key in result]
