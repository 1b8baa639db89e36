"""Rates that loadgen reaches on one core, and the error of its times, beside aiohttp, AIPerf and the bare loop.

    python -m scripts.bench_loadgen                       # about seven minutes
    python -m scripts.bench_loadgen --quick               # under two minutes: a look, not a result
    python -m scripts.bench_loadgen --aiperf VENV         # AIPerf too, from VENV/bin/aiperf

The client and all that it starts run on core 1, the built-in server on core 0. Rates and errors are taken from what the
server saw, the same way for all. What is measured how stands in docs/dev/load-bench.md.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from scripts.loadbench.cases import cases
from scripts.loadbench.results import Results
from scripts.loadbench.runs import Measured, measure
from scripts.loadbench.subjects import Subject, aiperf, kvtape, reference
from scripts.proxybench.conditions import Watch


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help="shorter runs, one round")
    made.add_argument("--rounds", type=int, metavar="N", help="default 3, quick 1")
    made.add_argument("--seconds", type=float, metavar="S", help="of a saturating run; default 5, quick 3")
    made.add_argument("--only", default="short,long,rate50,rate200", metavar="LIST", help="default: %(default)s")
    made.add_argument("--clients", default="kvtape,aiohttp,protocol", metavar="LIST", help="default: %(default)s")
    made.add_argument("--aiperf", type=Path, metavar="VENV", help="a virtual environment that has AIPerf")
    made.add_argument("--client-core", type=int, default=1, metavar="CORE", help="default %(default)s")
    made.add_argument("--server-core", type=int, default=0, metavar="CORE", help="default %(default)s")
    made.add_argument("--markdown", action="store_true", help="print the table for a document")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    made.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the clients wrote")
    return made


def subjects(args: argparse.Namespace, folder: Path) -> list[Subject]:
    """The clients asked for."""
    known = {
        "kvtape": kvtape(),
        "aiohttp": reference("aiohttp", "aiohttp_client"),
        "protocol": reference("bare loop", "protocol_client"),
    }
    found = [known[name] for name in args.clients.split(",")]
    return found if args.aiperf is None else [*found, aiperf(args.aiperf, folder)]


def bench(args: argparse.Namespace, folder: Path) -> list[Measured]:
    """Run each client on each case, round after round."""
    seconds = args.seconds or (3.0 if args.quick else 5.0)
    rounds = args.rounds or (1 if args.quick else 3)
    clients = subjects(args, folder)
    wanted = [case for case in cases(seconds) if case.name in args.only.split(",")]
    runs = []
    for turn in range(rounds):
        for case in wanted:
            for client in clients:
                where = folder / f"{case.name}-{client.name.replace(' ', '-')}-{turn}"
                cores = {"client_core": args.client_core, "server_core": args.server_core}
                runs.append(measure(client, case, where, **cores))
                _show(runs[-1])
    return runs


def _show(run: Measured) -> None:
    if run.complaint is not None:
        print(f"{run.subject}, {run.case}: {run.complaint}", file=sys.stderr)
    elif sys.stderr.isatty():
        print(f"\r\x1b[K{run.case} {run.subject}: {run.requests_per_s:,.0f} requests/s", end="", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, keep the JSON."""
    args = parser().parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="bench-loadgen-") as name:
        folder = args.keep or Path(name)
        os.environ["KVTAPE_KEY_FILE"] = str(folder / "key")
        runs = bench(args, folder)
    conditions = watch.stop(())
    results = Results(runs)
    print(results.table(list(dict.fromkeys(run.subject for run in runs)), markdown=args.markdown) + "\n")
    print(f"{datetime.now(UTC):%Y-%m-%d}; {conditions}")
    if args.json is not None:
        facts = {"conditions": asdict(conditions), "runs": [asdict(run) for run in runs]}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
