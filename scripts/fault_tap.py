"""Break what stands beside the tap's traffic, and count what clients notice: it must be nothing.

    python -m scripts.fault_tap                          # every fault, about a minute
    python -m scripts.fault_tap --only "disk full" --seconds 30 --users 64

While traffic of every kind passes (streams, unary, errors, streams lost upstream or left by the client), a fault is
made. A row a fault: client-visible failures, and the account of records from three sides: what clients sent, what the
tap says became of each, and what its files hold. Exit code 1: a fault was noticed, or a record is unaccounted for.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.proxybench.breakage import FAULTS
from scripts.proxybench.engine import Engine
from scripts.proxybench.faults import FaultImpossibleError, Finding, find
from wire.loop import run

ROW = "{:<18}  {:>7}  {:>6}  {:>8}  {:>8}  {:>11}  {:>5}  {}"
HEADER = ("fault", "noticed", "sent", "recorded", "in files", "sampled out", "exact", "dropped")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ", ".join(fault.name for fault in FAULTS)
    made.add_argument("--only", action="append", metavar="FAULT", help=f"one of: {names}; may be repeated")
    made.add_argument("--seconds", type=float, default=6.0, metavar="S", help="traffic per fault (default %(default)g)")
    made.add_argument("--users", type=int, default=24, metavar="N", help="clients at once (default %(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the findings")
    return made


async def break_all(args: argparse.Namespace) -> list[Finding]:
    """Make all wanted faults, each on its own tap; print a line for each result."""
    engine = Engine()
    upstream = await engine.listen()
    findings = []
    print(ROW.format(*HEADER))
    for fault in FAULTS:
        if args.only and fault.name not in args.only:
            continue
        with tempfile.TemporaryDirectory(prefix="fault-tap-") as name:
            try:
                found = await find(fault, engine, upstream, Path(name), seconds=args.seconds, users=args.users)
            except FaultImpossibleError as error:
                print(f"{fault.name}: left out: {error}", file=sys.stderr)
                continue
        findings.append(found)
        print(row(found), flush=True)
    return findings


def row(found: Finding) -> str:
    """A finding in one line, and what is wrong with it in further ones."""
    dropped = ", ".join(f"{reason} {count}" for reason, count in found.dropped.items()) or "0"
    noticed, exact = sum(found.failures.values()), "yes" if found.exact else "NO"
    counts = (found.sent, found.recorded, found.in_files, found.sampled_out)
    first = ROW.format(found.fault, noticed, *counts, exact, dropped)
    wrong = [f"{what}: {count}" for what, count in found.failures.items()] + found.problems
    if found.sent != found.offered:
        wrong.append(f"{found.sent} requests were sent, the tap says {found.offered}")
    return "\n".join([first, f"    {found.done}", *(f"    WRONG: {text}" for text in wrong)])


def main(argv: Sequence[str]) -> int:
    """Break, count, judge."""
    args = parser().parse_args(argv)
    findings = run(break_all(args))
    if args.json is not None:
        facts = [{**asdict(found), "exact": found.exact, "passed": found.passed} for found in findings]
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if findings and all(found.passed for found in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
