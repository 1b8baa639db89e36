"""Made-up numbers of a tap's processes, and a real admin process that is started and told as the supervisor does."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from measure.histogram import GAP_S, WAIT_S, add_value, empty_counts
from tap.ipc.messages import (
    AdminSetup,
    Progress,
    Ready,
    RecordNumbers,
    RequestCount,
    TapStats,
    UpstreamStats,
    WorkerStats,
    encode_frame,
)
from tests.warmstart import WarmPopen
from tracefile.records.schema import Engine
from wire.process import split_frames

ROOT = Path(__file__).parents[3]
UPSTREAM = "http://127.0.0.1:9"


def worker_stats(number: int = 0, **changes: Any) -> WorkerStats:
    stats = WorkerStats(
        worker=number,
        in_flight=7,
        connections=12,
        relayed=1_000,
        bytes_in=5_000_000,
        bytes_out=70_000_000,
        queue_bytes=120_000,
        queue_limit_bytes=128 << 20,
        loop_delay_s=0.0014,
        upstreams=[UpstreamStats(UPSTREAM, 400 + number, 3, False, 1, 8_192, 6_144)],
        misrouted={"raises": 2},
    )
    return msgspec.structs.replace(stats, **changes)


def record_numbers() -> RecordNumbers:
    ttft, gaps = empty_counts(WAIT_S), empty_counts(GAP_S)
    for value in (0.03, 0.07, 0.4):
        add_value(ttft, WAIT_S, value)
        add_value(gaps, GAP_S, value / 10)
    return RecordNumbers(
        requests=[
            RequestCount("/v1/chat/completions", "ok", 200, UPSTREAM, 780),
            RequestCount("/v1/chat/completions", "client_abort", 200, UPSTREAM, 15),
            RequestCount("/v1/completions", "error", 429, UPSTREAM, 5),
        ],
        ttft=ttft,
        gaps=gaps,
        prompt_tokens=2_000_000,
        cached_tokens=1_500_000,
        output_tokens=150_000,
    )


PROGRESS = Progress(
    received=810,
    recorded=800,
    hashed=790,
    unhashed={"request_not_json": 10},
    prompt_counts_checked=700,
    prompt_counts_matched=699,
    dropped={"trace_unwritable": 2},
    segments=3,
    uploaded=2,
    upload_failed=1,
    numbers=record_numbers(),
)


def tap_stats(**changes: Any) -> TapStats:
    """Of a tap that serves and records."""
    stats = TapStats(
        upstreams=[UPSTREAM],
        workers=2,
        workers_up=2,
        recorder_up=True,
        engine=Engine(name="vllm", version="0.32.0", block_size=16, num_gpu_blocks=4_001),
        offered=900,
        dropped={"queue_full": 6, "trace_unwritable": 2},
        worker_stats=[worker_stats()],
        progress=PROGRESS,
    )
    return msgspec.structs.replace(stats, **changes)


@dataclass
class AdminProcess:
    """The process, and the way to tell it things."""

    control: socket.socket
    process: "subprocess.Popen[bytes]"
    url: str

    def tell(self, stats: TapStats) -> None:
        self.control.sendall(encode_frame(stats))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def once(self, path: str, wanted: str) -> str:
        """The page, once it holds these words; what is told is shown a moment later."""
        deadline = time.monotonic() + 30
        while wanted not in (page := self.get(path).text):
            assert time.monotonic() < deadline, page
            time.sleep(0.1)
        return page


@pytest.fixture
def admin() -> Iterator[AdminProcess]:
    """One for the length of a test; at its end it leaves by itself, saying nothing."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        process = WarmPopen(
            [sys.executable, "-P", "-m", "tap.admin", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), listener.fileno()),
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        ours.sendall(encode_frame(AdminSetup(listen_fd=listener.fileno(), trace="captured.jsonl")))
        buffer = bytearray()
        while not (frames := split_frames(buffer)):
            buffer += ours.recv(1 << 16)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert msgspec.msgpack.decode(frames[0], type=Ready) == Ready()
    yield AdminProcess(ours, process, url)
    ours.close()
    _, complaints = process.communicate(timeout=30)
    assert (process.returncode, complaints) == (0, b"")
