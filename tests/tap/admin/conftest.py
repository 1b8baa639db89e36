"""A real admin process: started as the supervisor does, fed as workers and the recorder do."""

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tap.admin.control import AdminSetup, ServiceStats
from tap.admin.feed import FeedSender, RecorderStats, RecordFeed, RequestCount, SeenRecord, WorkerStats
from tap.admin.histogram import GAP_S, OVERHEAD_S, WAIT_S, add_value, empty_counts
from tap.exchange import Progress, Ready, encode_frame, split_frames
from tracefile.schema import BlockHash, Engine

ROOT = Path(__file__).parents[3]
BLOCK = 16


@dataclass
class AdminProcess:
    """The process and the two ways to tell it things."""

    control: socket.socket
    process: "subprocess.Popen[bytes]"
    sender: FeedSender
    url: str

    def tell(self, stats: ServiceStats) -> None:
        self.control.sendall(encode_frame(stats))

    def push(self, message: msgspec.Struct) -> None:
        assert self.sender.offer(encode_frame(message))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def live(self) -> Any:
        return self.get("/live.json").json()

    def live_once(self, wanted: str, value: object) -> Any:
        """The snapshot, once the value at a dotted path is this one; what is pushed is shown a moment later."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            live = found = self.live()
            for step in wanted.split("."):
                found = found[int(step)] if step.isdigit() else found[step]
            if found == value:
                return live
            time.sleep(0.1)
        raise AssertionError(f"{wanted} stayed {found!r}")


def start_admin(folder: Path) -> AdminProcess:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tap.admin", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), listener.fileno()),
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        feed_socket = str(folder / "admin.sock")
        setup = AdminSetup(
            listen_fd=listener.fileno(), feed_socket=feed_socket, trace="captured.jsonl", block_size=BLOCK
        )
        ours.sendall(encode_frame(setup))
        buffer = bytearray()
        while not (frames := split_frames(buffer)):
            buffer += ours.recv(1 << 16)
    assert msgspec.msgpack.decode(frames[0], type=Ready) == Ready()
    return AdminProcess(ours, process, FeedSender(feed_socket), f"http://127.0.0.1:{port}")


@pytest.fixture
def admin() -> Iterator[AdminProcess]:
    """One for the length of a test; at its end it leaves by itself, saying nothing."""
    with tempfile.TemporaryDirectory() as folder:  # a unix socket's path is short
        found = start_admin(Path(folder))
        yield found
        found.sender.close()
        found.control.close()
        _, complaints = found.process.communicate(timeout=30)
        assert (found.process.returncode, complaints) == (0, b"")


def service_stats(upstream: str = "http://127.0.0.1:9", **changes: Any) -> ServiceStats:
    engine = Engine(name="vllm", version="0.32.0", block_size=BLOCK, num_gpu_blocks=4_001)
    stats = ServiceStats(
        upstreams=[upstream],
        workers=2,
        workers_up=2,
        engine=engine,
        offered=900,
        dropped={"queue_full": 6, "trace_unwritable": 2},
    )
    return msgspec.structs.replace(stats, **changes)


def worker_stats(number: int = 0, **changes: Any) -> WorkerStats:
    chunk = empty_counts(OVERHEAD_S)
    for microseconds in (12, 14, 18, 25, 90):
        add_value(chunk, OVERHEAD_S, microseconds * 1e-6)
    stats = WorkerStats(
        worker=number,
        pid=100 + number,
        in_flight=7,
        connections=12,
        relayed=1_000,
        bytes_in=5_000_000,
        bytes_out=70_000_000,
        queue_bytes=120_000,
        queue_limit_bytes=128 << 20,
        loop_delay_s=0.0014,
        chunk=chunk,
    )
    return msgspec.structs.replace(stats, **changes)


def recorder_stats(**changes: Any) -> RecorderStats:
    ttft, gaps, head = empty_counts(WAIT_S), empty_counts(GAP_S), empty_counts(OVERHEAD_S)
    for value in (0.03, 0.07, 0.4):
        add_value(ttft, WAIT_S, value)
        add_value(gaps, GAP_S, value / 10)
        add_value(head, OVERHEAD_S, value / 1e3)
    stats = RecorderStats(
        pid=99,
        progress=Progress(
            received=889,
            recorded=800,
            hashed=790,
            unhashed={"request_not_json": 10},
            prompt_counts_checked=700,
            prompt_counts_matched=699,
            sampled_out=80,
            dropped={"trace_unwritable": 2},
            segments=3,
            uploaded=2,
            upload_failed=1,
        ),
        feed_skipped=5,
        requests=[
            RequestCount("/v1/chat/completions", "ok", 200, "http://127.0.0.1:9", 780),
            RequestCount("/v1/chat/completions", "client_abort", 200, "http://127.0.0.1:9", 15),
            RequestCount("/v1/completions", "error", 429, "http://127.0.0.1:9", 5),
        ],
        ttft=ttft,
        gaps=gaps,
        request_head=head,
        prompt_tokens=2_000_000,
        cached_tokens=1_500_000,
        output_tokens=150_000,
    )
    return msgspec.structs.replace(stats, **changes)


def conversation_feed(sessions: int = 60, turns: int = 5, seed: int = 1) -> RecordFeed:
    """Sessions on two system prompts of 120 and 300 blocks; later turns find their past cached and are quick."""
    draw = random.Random(seed)
    systems = [[BlockHash(draw.getrandbits(64)) for _ in range(blocks)] for blocks in (120, 300)]
    histories = [list(draw.choice(systems)) for _ in range(sessions)]
    records = []
    for turn in range(1, turns + 1):
        for history in histories:
            cached = 0 if turn == 1 and draw.random() < 0.3 else BLOCK * len(history)
            history += [BlockHash(draw.getrandbits(64)) for _ in range(draw.randint(5, 60))]
            prompt = BLOCK * len(history) + draw.randint(0, 15)
            ttft_ms = (15 + 0.06 * (prompt - cached)) * draw.lognormvariate(0, 0.25)
            gone = draw.random() < 0.04
            records.append(
                SeenRecord(
                    "client_abort" if gone else "ok",
                    True,
                    turn,
                    None if gone else ttft_ms,
                    0.7 * ttft_ms if gone else 20 * ttft_ms,
                    prompt,
                    None if gone else cached,
                    list(history),
                )
            )
    return RecordFeed(records)
