"""The fidelity matrix: capture loads on a real engine, then judge forecasts of what no fit ever saw.

    python -m scripts.matrix                                    # everything, about five hours
    python -m scripts.matrix capture --only '128x2/session-*'   # some captures
    python -m scripts.matrix judge                              # from the files that are there, in minutes
    python -m scripts.matrix judge --captures data/captures     # from those that docs/dev/results.md is about

A capture that exists with the same definition is kept, and so is what is whole after Ctrl-C: run it again to go on.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from scripts.engine_home import measuring_cores, on_core
from scripts.fidelity import tables
from scripts.fidelity.capturing import capture_missing
from scripts.fidelity.goals import goals, rounds
from scripts.fidelity.judging import judge_all
from scripts.fidelity.loads import LOADS, Capture
from scripts.fidelity.loads import captures as matrix
from scripts.fidelity.sizing import add_sized_loads


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("action", choices=["all", "capture", "judge"], nargs="?", default="all")
    made.add_argument("--engine", choices=["vllm", "sim"], default="vllm", help="default: %(default)s")
    made.add_argument("--shapes", nargs="+", metavar="SHAPE", help="models (default: all)")
    made.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="captures whose SHAPE/NAME is like one")
    made.add_argument("--out", type=Path, default=Path("out/results"), help="default: %(default)s")
    made.add_argument("--captures", type=Path, metavar="DIR", help="judge those that are there (default: OUT's)")
    return made


def selected(shapes: Sequence[str] | None, only: Sequence[str]) -> list[Capture]:
    """The captures that were asked for, the most valuable first. Null: of all models."""
    return [found for found in matrix(shapes) if any(fnmatchcase(f"{found.shape}/{found.name}", like) for like in only)]


def main() -> int:
    """Capture, judge, or both."""
    args = parser().parse_args()
    add_sized_loads((args.captures or args.out).resolve())
    if unknown := [shape for shape in args.shapes or () if shape not in LOADS]:
        parser().error(f"--shapes {unknown[0]}: expected {', '.join(LOADS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that engines are stopped too
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.action != "judge":
        # The engine has a core to itself; everything else shares the other.
        load_core, _ = measuring_cores()
        with on_core(load_core):
            capture_missing(args.engine, out, selected(args.shapes, args.only), matrix())
    if args.action != "capture":
        judge((args.captures or out).resolve(), out, selected(args.shapes, args.only))
    return 0


def judge(captures: Path, out: Path, wanted: list[Capture]) -> None:
    """Judge what is there of it; leaves ``verdicts.json``, and the tables, which are shown."""
    verdicts = judge_all(captures, out, wanted)
    judged = {name: goals(cells) for name, cells in rounds(verdicts.cells).items()}
    result = {"goals": judged, "verdicts": verdicts}
    (out / "verdicts.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    text = tables.page(verdicts)
    (out / "verdicts.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
