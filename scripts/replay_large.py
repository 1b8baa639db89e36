"""Replay a large trace on the embedded engine at full speed, and hold the replay to its account.

    python -m scripts.replay_large TRACE [--limit N] [--procs N] [--parallel P] [FLAGS OF REPLAY]

Every request of the trace must be sent, left out, or not sent for a reason that is named; every one that was sent must
have a record; no process may outlive the run. Exit status 0 if so. Memory is the largest of the run's processes.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay.fidelity import Account
from tracefile import open_trace

ENGINE = ("--block-size", "16", "--num-gpu-blocks", "200000", "--max-model-len", "200000", "--speed", "max")


@contextmanager
def embedded_engine() -> Iterator[str]:
    """``sim serve`` on a port of its own; gives its URL."""
    command = [sys.executable, "-m", "sim", "serve", "--listen", "127.0.0.1:0", *ENGINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            if found is None:
                raise SystemExit("sim serve did not start")
            yield found.group()
        finally:
            server.terminate()


def replay(trace: Path, url: str, out: Path, summary: Path, flags: list[str]) -> float:
    """Run it as a user does; gives its seconds."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "replay", str(trace), "--url", url, "-o", str(out), "--json"]
    with summary.open("w") as stdout:
        subprocess.run([*command, *flags], check=True, stdout=stdout)
    return time.perf_counter() - began_s


def main() -> int:
    """Replay, then add up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="TRACE")
    parser.add_argument("--parallel", default="64", metavar="P", help="requests in flight, closed loop (64)")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, embedded_engine() as url:
        out, summary = Path(folder) / "out.jsonl.zst", Path(folder) / "summary.json"
        closed = ["--closed-loop", "--parallel", args.parallel]
        seconds = replay(args.source, url, out, summary, [*closed, *flags])
        memory_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # the engine is still running
        account = Account(**json.loads(summary.read_text())["account"])
        with open_trace(out) as reader:
            statuses = Counter(record.status for record in reader)
    account.check_integrity()
    missing = account.sent - statuses.total()
    rate = account.sent / seconds
    print(f"{account.sent} sent in {seconds:.0f} s ({rate:.0f}/s), {dict(statuses)}, {memory_mb:.0f} MB at most")
    print(f"accounted for: {account.requests} requests; without a record: {missing}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
