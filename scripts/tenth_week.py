"""Ten weeks of a tap on a simulated clock: files, manifest, memory and CPU of the recorder; the last hour is recorded.

    python -m scripts.tenth_week --requests 500000000 --last-hour 20000

Hourly segments of a few records stand for the weeks. The last hour's figures are extrapolated to all requests.
Segments are kept as ``--keep 30d`` does.
"""

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from scripts.bench_recorder import exchange, setup
from tap.ipc.exchange import ExchangeCopy
from tap.recorder.recorder import Recorder
from tracefile.storage.segments import manifest_path

HOUR_S, DAY_S = 3600, 86_400
HOURS = 70 * 24
KEEP_S = 30 * DAY_S
RECORDS_A_SEGMENT = 2
PROMPT_TOKENS = 5000
SHARED_PREFIXES = 200
EPOCH_S = 1_700_000_000


def rss_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Weeks:
    """A recorder whose clocks are set by hand."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "tap.jsonl.zst"
        self.recorder = Recorder(
            msgspec.structs.replace(setup(self.trace), rotate_bytes=1 << 40, rotate_s=1e9, keep_s=float(KEEP_S))
        )
        self.wall_s = float(EPOCH_S)
        self.draw = random.Random(1)
        self.shared = [self.draw.choices(range(1000, 100_000), k=PROMPT_TOKENS // 2) for _ in range(SHARED_PREFIXES)]
        segments = self.recorder._trace
        segments._retention = dataclasses.replace(segments._retention, now_unix_s=lambda: self.wall_s)

    def exchanges(self, hour: int, count: int) -> Iterator[ExchangeCopy]:
        """Yield requests spread over an hour; half of each prompt is shared with others."""
        for number in range(count):
            own = self.draw.choices(range(1000, 100_000), k=PROMPT_TOKENS // 2)
            made = exchange(number, self.draw.choice(self.shared) + own)
            made.arrival_ns = int((hour + number / count) * HOUR_S * 1e9)
            made.end_ns = made.arrival_ns + 20_000_000
            yield made

    def close_segment(self, hour: int) -> float:
        """Close the hour's segment, as at its age; return the CPU seconds that closing and retention took."""
        segments = self.recorder._trace
        self.wall_s = EPOCH_S + (hour + 1.0) * HOUR_S
        self.recorder.tick()
        closing = segments._segment
        assert closing is not None
        segments._rotate_bytes, began_s = 1, time.process_time()
        self.recorder.tick()
        segments._rotate_bytes, spent_s = 1 << 40, time.process_time() - began_s
        os.utime(closing.path, (self.wall_s, self.wall_s))
        return spent_s


def simulate(folder: Path, requests: int, last_hour: int) -> None:
    """Record ten weeks and print the table."""
    weeks = Weeks(folder)
    rows: list[tuple[str, str]] = []
    for hour in range(HOURS - 1):
        for made in weeks.exchanges(hour, RECORDS_A_SEGMENT):
            weeks.recorder.take(made)
        spent_s = weeks.close_segment(hour)
        if hour + 1 in (24, 35 * 24, HOURS - 1):
            files = len(list(folder.iterdir()))
            rows.append(
                (f"after {(hour + 1) / 24:.0f} days", f"{files:,} files, {rss_mib():.0f} MiB, {spent_s * 1e3:.1f} ms")
            )
    rows += _record_last_hour(weeks, requests, last_hour)
    for name, told in rows:
        print(f"| {name} | {told} |")


def _record_last_hour(weeks: Weeks, requests: int, last_hour: int) -> list[tuple[str, str]]:
    """Record the hour's requests; return its figures, extrapolated to all requests."""
    spent_s, memory = 0.0, []
    for number, made in enumerate(weeks.exchanges(HOURS - 1, last_hour)):
        began_s = time.process_time()
        weeks.recorder.take(made)
        if number % 500 == 0:
            weeks.recorder.tick()
        spent_s += time.process_time() - began_s
        if number % max(last_hour // 4, 1) == 0:
            memory.append(f"{rss_mib():.0f}")
    weeks.close_segment(HOURS - 1)
    ended = weeks.recorder.close()
    size = weeks.recorder._trace.manifest.segments[-1].bytes / last_hour
    kept_gb = requests * size * KEEP_S / (HOURS * HOUR_S) / 1e9
    listed = manifest_path(weeks.trace).stat().st_size
    return [
        ("memory within the last hour", f"{', '.join(memory)} MiB"),
        ("recorder, a request", f"{spent_s / last_hour * 1e6:.0f} µs CPU, {size:,.0f} bytes"),
        ("manifest", f"{listed:,} bytes; {ended.deleted:,} segments deleted"),
        (f"{requests:,} requests", f"{requests * size / 1e9:,.0f} GB recorded, {kept_gb:,.0f} GB kept"),
        ("recorder, all", f"{requests * spent_s / last_hour / DAY_S:.1f} days of one core in 70"),
    ]


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=500_000_000)
    parser.add_argument("--last-hour", type=int, default=20_000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        simulate(Path(folder), args.requests, args.last_hour)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
