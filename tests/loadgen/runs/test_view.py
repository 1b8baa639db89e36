"""What people see of a run: literal screens at several widths, and a real terminal that is left as it was found."""

import asyncio
import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from loadgen.runs.progress import RunProgress, ShardStatus, Status
from loadgen.runs.view import View, status_line, watched
from tests.warmstart import WarmPopen
from tracefile import load_trace
from tracefile.commandline.progress import clock


def shard(sent: int, silent_s: float | None = None) -> ShardStatus:
    return ShardStatus(where="process 1", sent=sent, in_flight=6, errors=1, silent_s=silent_s)


STATUS = Status(
    elapsed_s=83.4,
    remaining_s=156.2,
    stopping=None,
    planned=12031,
    sent=4213,
    in_flight=12,
    done=4199,
    errors=2,
    queued=0,
    target_rate=50.0,
    rate=50.1,
    output_tokens_per_s=1204.2,
    ttft_p50_ms=52.1,
    ttft_p99_ms=1140.2,
    itl_p50_ms=7.1,
    itl_p99_ms=12.03,
    lag_p50_ms=0.05,
    lag_p99_ms=0.31,
    hit_rate=0.831,
    shards=[shard(2107), shard(2106, silent_s=3.2)],
)

WIDE = """\
1:23  4,201 of 12,031 over  2:36 left
━━━━━━━━━━━━━━━━━━━━━━━━━━━━────────────────────────────────────────────────────
sent       4,213    rate    50.1 of 50.0/s  TTFT  p50 52.1 p99 1,140 ms
in flight  12       output  1,204 tokens/s  ITL   p50 7.10 p99 12.0 ms
done       4,199    cached  83.1%           lag   p50 0.05 p99 0.31 ms
errors     2        queued  0
shards  0: 2,107  1: 2,106  1 silent for 3 s
"""

NARROW = """\
1:23  4,201 of 12,031 over  2:36 left
━━━━━━━━━━━━━━──────────────────────────
sent       4,213
in flight  12
done       4,199
errors     2
rate       50.1 of 50.0/s
output     1,204 tokens/s
cached     83.1%
queued     0
TTFT       p50 52.1 p99 1,140 ms
ITL        p50 7.10 p99 12.0 ms
lag        p50 0.05 p99 0.31 ms
shards  0: 2,107  1: 2,106  1 silent fo…
"""

BEGINNING = """\
0:00
sent       0        rate    0.0/s
in flight  0        output  0 tokens/s
done       0        cached  -
errors     0        queued  0
TTFT  -
ITL   -
lag   -
"""


def screen(status: Status, width: int) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"), color_system=None)  # noqa: SIM115
    with console.file:
        console.print(View(status))
    return "".join(line.rstrip() + "\n" for line in console.export_text().splitlines())


def nothing_yet() -> Status:
    empty = dict.fromkeys(["remaining_s", "planned", "target_rate", "hit_rate"])
    empty |= {name: None for name in Status.__struct_fields__ if name.endswith("_ms")}
    zero = dict.fromkeys(["elapsed_s", "rate", "output_tokens_per_s"], 0.0)
    counts = dict.fromkeys(["sent", "in_flight", "done", "errors", "queued"], 0)
    return msgspec.structs.replace(STATUS, **empty, **zero, **counts, shards=[shard(0)])


@pytest.mark.parametrize(
    ("status", "width", "expected"), [(STATUS, 80, WIDE), (STATUS, 40, NARROW), (nothing_yet(), 60, BEGINNING)]
)
def test_screens(status: Status, width: int, expected: str) -> None:
    assert screen(status, width) == expected


@pytest.mark.parametrize("width", [10, 24, 53, 54, 79, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in screen(STATUS, width).splitlines()) <= width


def test_a_stop_says_what_happens_now() -> None:
    stopping = msgspec.structs.replace(STATUS, stopping="SIGINT")
    assert "SIGINT: recording what is in flight; once more leaves at once" in screen(stopping, 150)


def test_the_log_has_it_in_a_line() -> None:
    assert status_line(STATUS) == (
        "1:23 · sent 4213/12031 · in flight 12 · done 4199 · errors 2 · 50.1 of 50.0/s · TTFT p50 52.1 p99 1,140 ms · "
        "ITL p50 7.10 p99 12.0 ms · lag p50 0.05 p99 0.31 ms · cached 83% · shard 1 silent for 3 s · 2:36 left"
    )
    assert status_line(nothing_yet()) == "0:00 · sent 0 · in flight 0 · done 0 · errors 0 · 0.0/s"


def test_clocks() -> None:
    assert [clock(seconds) for seconds in (0.0, 59.9, 61.0, 3600.0)] == ["0:00", "0:59", "1:01", "1:00:00"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, b"\x1e\x00\x64\x00\x00\x00\x00\x00")
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def read_until(ours: int, pattern: bytes, process: "subprocess.Popen[bytes]") -> bytes:
    said = b""
    while re.search(pattern, said) is None:
        assert process.poll() is None, said.decode()
        said += os.read(ours, 65536)
    return said


def test_ctrl_c_on_a_terminal_leaves_it_as_it_was(engine: Any, tmp_path: Path, terminal: tuple[int, int]) -> None:
    engine.stalls = True
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "loadgen", "--url", engine.url, "-o", str(tmp_path / "t.jsonl")]
    process = subprocess.Popen(
        [
            *command,
            *["--pattern", "constant", "--rate", "20", "--number", "1000", "--procs", "2", "--log-interval", "0.1s"],
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
        preexec_fn=take_terminal,  # noqa: PLW1509 - how a process gets a terminal to be interrupted from
    )
    try:
        # The panel redraws itself: it goes up by as many lines as it has, and writes over them.
        said = read_until(ours, rb"(?s)in flight.*\x1b\[1A.*in flight", process)
        said += read_until(ours, " · in flight [0-9]+ · done 0 ".encode(), process)
        os.write(ours, b"\x03")
        said += read_until(ours, rb"workload +[0-9a-f]{64}", process)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait()
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l") >= 0  # the cursor is there again
    assert b"Traceback" not in said
    summary = said[said.rfind(b"\x1b[?25h") :]
    assert b"constant: " in summary  # where the panel was, the summary stands
    assert b"in flight" not in summary
    assert termios.tcgetattr(theirs) == before
    assert len(load_trace(tmp_path / "t.jsonl")[1]) == len(engine.seen)


def test_progress_lines_come_at_the_interval_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    class Progress(RunProgress):
        def __init__(self) -> None:
            self.told, self.thrice = 0, asyncio.Event()

        def status(self) -> Status:
            self.told += 1
            if self.told == 3:
                self.thrice.set()
            return STATUS

    async def watching(interval_s: float | None, lines: int) -> str:
        progress = Progress()
        async with watched(progress, None, interval_s):
            if lines:
                await progress.thrice.wait()
            await asyncio.sleep(0.05)
        return capsys.readouterr().err

    assert asyncio.run(watching(0.01, 3)).splitlines()[:3] == [status_line(STATUS)] * 3
    assert asyncio.run(watching(0.0, 0)) == ""
    assert asyncio.run(watching(None, 0)) == ""  # ten seconds, where stderr is no terminal


def test_a_log_gets_no_control_codes(engine: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadgen", "--url", engine.url, "-o", str(tmp_path / "t.jsonl")]
    flags = ("--pattern", "constant", "--rate", "20", "--number", "30", "--json-progress", "-")
    process = WarmPopen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "\x1b" not in out + err
    statuses = [msgspec.json.decode(line, type=Status) for line in err.splitlines()]
    assert [status.elapsed_s for status in statuses] == sorted(status.elapsed_s for status in statuses)
    last = statuses[-1]  # told at the end, so that it has the run's own counts
    assert (last.sent, last.done, last.in_flight, last.planned) == (30, 30, 0, 30)
    assert last.target_rate == 20.0
