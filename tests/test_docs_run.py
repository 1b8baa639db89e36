"""Every command of the user pages is run where it can be: page by page, in order, on the embedded engine.

Runs are made short: fewer requests, members and resamples. Hosts and ports are this test's. Files that a page takes
from the reader are committed captures. Lines that no test runs have their reason in ``tests.doccommands``.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvtape.completion import PROGRAMS
from scripts.processes import free_port
from sim.latency.modelfile import make_model, save_model
from sim.vllm.config import EngineConfig
from tests.conftest import running_sim_server
from tests.doccommands import ROOT, USER_PAGES, lines, reason
from tests.fakes.vocabularies import write_model
from tests.warmstart import WARM, WarmPopen
from tracefile.__main__ import main as tracefile
from wire.process import module_environment

pytestmark = [pytest.mark.docs, pytest.mark.timeout(900)]
CAPTURES = ROOT / "data" / "captures" / "128x2"
TRACES = {
    **dict.fromkeys(("monday.jsonl.zst", "captured.jsonl.zst", "ours.jsonl.zst", "host-1.jsonl.zst"), "session-fast"),
    **dict.fromkeys(("tuesday.jsonl.zst", "this-morning.jsonl.zst", "a-p8.jsonl.zst"), "session-fast-again"),
    **dict.fromkeys(("replayed.jsonl.zst", "captured-replay.jsonl.zst", "staging.jsonl.zst"), "session-fast-replayed"),
    "host-2.jsonl.zst": "session-slow-again",
    **dict.fromkeys(("llama.jsonl.zst", "sglang.jsonl.zst"), "session-slow"),
    **dict.fromkeys(("a-p16.jsonl.zst", "b-p8.jsonl.zst"), "session-fast"),
    **dict.fromkeys(("a.jsonl.zst", "a.jsonl", "run.jsonl.zst", "tap.jsonl.zst"), "session-slow"),
    **dict.fromkeys(("b.jsonl.zst", "b.jsonl", "c.jsonl.zst", "c.jsonl"), "session-slow-again"),
    **{"calibration.jsonl.zst": "calibration-1", "calibration-1.jsonl.zst": "calibration-1"},
    "calibration-2.jsonl.zst": "calibration-2",
    "b-p16.jsonl.zst": "session-fast-replayed",
}
"""Files of the reader's by name: which capture each is."""
COSTS = {"t0_ms": 5.0, "per_prefill_token_ms": 0.05, "per_decode_ms": 0.2}
SHORTER = (
    (r"^loadgen (?!sweep|build)", "loadgen --number 6 "),
    (r"--number \d+", "--number 6"),
    (r"--duration \S+", ""),
    (r"--rate \d\S*(?= .*--number)", "--rate 20"),
    (r"--think \S+", "--think 0.01s:0.02s"),
    (r"^replay ", "replay --speedup 50 "),
    (r"^sim (what-if|search|sweep|validate|calibrate) ", r"sim \1 --members 2 "),
    (r"^sim calibrate (?!.*--pace-from)", r"sim calibrate --bootstrap 0 "),
    (r"^sim calibrate (?!.*-from)", r"sim calibrate --config quick.toml "),
    (r"^report (compare|sweep) ", r"report \1 --bootstrap 5 "),
    (r"--between 1,8", "--between 1,3"),
    (r"curve curve.json misses.json", "curve curve.json"),
    (r"deploy:at=\w+:startup=60s", "deploy:at=20s:startup=10s"),
    (r"--block-size 512", ""),
    (r"--num-gpu-blocks 250,375,500", "--num-gpu-blocks 500,700"),  # the engine's blocks are half as long here
    (r"--from 1h --until 2h", "--from 10s --until 60s"),
    (r"data/grids/fleet.toml", "grid.toml"),
    (r"/models/[\w-]+", "model"),
    (r"\$T\b", "--url http://localhost:8000 -o out.jsonl"),
    (r"\$C\b", "data/captures/128x2"),
    (r"\$A\b", "captured.jsonl.zst"),
)
"""What is made shorter, and the names that stand for the reader's own."""
GATES = re.compile(r"^(sim (calibrate|validate|audit|search)|report|kvtape doctor|.*--(gate|slo) )")
"""Commands whose exit codes 1 and 3 say something of the numbers."""
SERVERS = re.compile(r"^(tap (?!read-log)|sim serve)")
CONFIG = {
    **{"model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 512, "head_dim": 64},
    **{"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4},
}
"""A model's config.json."""
QUICK = '[sim.calibrate]\nterm = ["none"]\napi-server = "parallel"\n'
GRID = "[axes]\nreplicas = [1, 2]\nnum-gpu-blocks = [2000, 4000]\n"
READY_S = 30.0


class Reader:
    """Who follows one page: a folder, the engine, and the servers that the page starts."""

    def __init__(self, folder: Path, engine: str, models: Mapping[int, Path]) -> None:
        self.folder, self.engine, self.models = folder, engine, models
        self.servers: dict[str, subprocess.Popen[Any]] = {}
        self.ports: dict[str, int] = {}
        self.written: dict[str, str] = {}
        self.made: set[str] = set()
        self.used: set[str] = set()
        for name in ("data", "loadgen", "scripts"):
            (folder / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "deploy", folder / "deploy")  # commands of its pages write there
        self.restore()
        captured = str(folder / "captured.jsonl.zst")
        tracefile(["convert", captured, str(folder / "conversation_trace.jsonl"), "--to", "mooncake"])
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_model("deepseek", folder / "model")
        (folder / "model.json").touch()
        (folder / "nightly").symlink_to(CAPTURES)
        (folder / "grid.toml").write_text(GRID)
        (folder / "quick.toml").write_text(QUICK)
        (folder / "requests.jsonl").write_text('{"model": "m", "prompt": "once upon a time"}\n' * 3)
        (folder / "my.py").write_text("def choose(request, engines):\n    return 0\n")
        self.given = {path.name for path in folder.iterdir() if path.is_file()}
        programs = folder / "bin"
        programs.mkdir()
        for program in ("kvtape", *PROGRAMS):
            (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} -m {program} "$@"\n')
            (programs / program).chmod(0o755)
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        self.environment = {**module_environment(), "PATH": path, "KVTAPE_KEY_FILE": str(folder / "hash.key")}

    def url(self, result: re.Match[str]) -> str:
        """A URL of the page, at the server that stands for it."""
        return f"http://127.0.0.1:{self.ports[result[1]]}" if result[1] in self.ports else self.engine

    def listen(self, result: re.Match[str]) -> str:
        self.ports[result[1]] = free_port()
        return f"--listen 127.0.0.1:{self.ports[result[1]]}"

    def follow(self, line: str) -> None:
        """Run one line; a server goes on until the page ends, or another takes its port."""
        if "-o model.json" in line:
            (self.folder / "model.json").unlink(missing_ok=True)
        elif "model.json" not in self.made:
            shutil.copyfile(self.models[512 if "conversation_trace" in line else 32], self.folder / "model.json")
        for pattern, text in SHORTER:
            line = re.sub(pattern, text, line)
        for port in [port for port in self.servers if self.written[port] and self.written[port] in line]:
            self.stop(port)  # Ctrl-C, before its file is read
        if SERVERS.match(line):
            self.serve(re.sub(r"\s*&$", "", line))
        else:
            line, stopped = re.subn(r"\s*&& kill %1", "", re.sub(r"http://[\w.-]+:(\d+)", self.url, line))
            self.forget(line)
            self.run(line)
            if line.startswith("tap read-log"):
                self.restore()
            if stopped:
                self.stop(next(iter(self.servers)))

    def forget(self, line: str) -> None:
        """Remove a file that the line is to write, unless it is one that the page has the reader keep."""
        for name in re.findall(r"(?:-o|--output|>|tracefile convert(?: +[^-\s]\S*)+?(?= +\S+(?: +-|$))) +(\S+)", line):
            if name in self.made or name in self.given - self.used:
                (self.folder / name).unlink(missing_ok=True)
            self.made.add(name)
        self.used |= set(line.split()) - self.made

    def restore(self) -> None:
        """Give captures that were made short their places again."""
        for name, capture in TRACES.items():
            shutil.copyfile(CAPTURES / f"{capture}.jsonl.zst", self.folder / name)

    def run(self, line: str) -> None:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        plain = words[0] in ("kvtape", *PROGRAMS) and not any(
            re.search(r"^[;&|<>()]+$|[$?*\[]", word) for word in words
        )
        command = [sys.executable, "-m", *words] if plain else ["bash", "-euo", "pipefail", "-c", line]
        done = (WARM if plain else subprocess).run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        allowed = (0, 1, 3) if GATES.match(line) or "grep" in line else (0,)
        assert done.returncode in allowed, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert "Traceback" not in done.stderr, done.stderr

    def serve(self, line: str) -> None:
        """Start a server, and wait until it takes connections."""
        port = next(iter(re.findall(r"--listen \S*?:(\d+)", line)), "8000" if line.startswith("sim serve") else "8001")
        upstream = re.sub(r"http://[\w.-]+:(\d+)", self.url, line)
        if port in self.servers:
            self.stop(port)
        self.forget(line)
        if "--listen" not in line:
            upstream += f" --listen 127.0.0.1:{port}"
        command = [sys.executable, "-m", *shlex.split(re.sub(r"--listen \S*?:(\d+)", self.listen, upstream))]
        with (self.folder / f"{port}.log").open("w") as log:
            process = WarmPopen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, text=True)
        self.written[port] = next(iter(re.findall(r"(?:-o|--output) +(\S+)", line)), "")
        self.servers[port] = process
        for waited in count():
            assert process.poll() is None, (line, (self.folder / f"{port}.log").read_text())
            assert waited * 0.05 < READY_S, line
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.ports[port])) == 0:
                    return
            time.sleep(0.05)

    def stop(self, port: str) -> None:
        """Ctrl-C; a capture that was made short gives its place to the given one."""
        process = self.servers.pop(port)
        self.ports.pop(port, None)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=30)
        reported = (self.folder / f"{port}.log").read_text()
        assert code in (0, 1, 130), reported
        assert "Traceback" not in reported, reported
        self.restore()

    def leave(self) -> None:
        for port in list(self.servers):
            self.stop(port)


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with running_sim_server("--block-size", "32", "--num-gpu-blocks", "4096", "--t0-ms", "1") as url:
        yield url


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """Latency models by block size."""
    folder, made = tmp_path_factory.mktemp("models"), {}
    for block_size, blocks in {32: 4096, 512: 10_001}.items():
        config = EngineConfig(
            num_gpu_blocks=blocks, block_size=block_size, max_num_seqs=32, max_num_batched_tokens=2048
        )
        made[block_size] = folder / f"{block_size}.json"
        save_model(make_model(COSTS, config), made[block_size])
    return made


TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in USER_PAGES}
RUN = {page: [line for line in lines(text) if not reason(line)] for page, text in TEXTS.items()}


@pytest.mark.parametrize("page", [page for page, result in RUN.items() if result])
def test_commands_of_pages_run(page: str, engine: str, models: Mapping[int, Path], tmp_path: Path) -> None:
    reader = Reader(tmp_path, engine, models)
    try:
        for line in RUN[page]:
            reader.follow(line)
    finally:
        reader.leave()


def test_notebook_cells_print_the_documented_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    text = (ROOT / "docs" / "recipes" / "notebook.md").read_text()
    for code, expected in re.findall(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL):
        exec(compile(code, "notebook.md", "exec"), names)
        reported = capsys.readouterr().out
        assert not expected or reported == expected
