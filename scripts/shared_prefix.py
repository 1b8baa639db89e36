"""Decode time that an engine saves when the outputs of a step share one prefix, against separate prompts.

    python -m scripts.shared_prefix                               # on a real vLLM on this machine's CPU, five minutes
    python -m scripts.shared_prefix --url http://localhost:8000   # on a vLLM that does nothing else

Answers at once, all of them equally long, once behind a shared prefix and once behind as many tokens that nobody
shares; a step's time is the gap between tokens while all of them are being answered. The model of ``sim fit`` charges
both alike.
"""

import argparse
import contextlib
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from loadgen.core.request import origin_of
from scripts.engine_home import measuring_cores, on_core
from scripts.fidelity.engines import engine
from scripts.fidelity.loads import EngineSettings
from scripts.job import Workspace, add_engine_arguments
from sim.fit.schedule import seen_tokens
from tracefile import load_trace

NEW_TOKENS = 32
"""Of a prompt behind a shared prefix."""
HIDDEN, LAYERS = 128, 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(made)
    made.add_argument("--answers", type=int, nargs="+", default=[4, 8, 16, 32], metavar="N", help="at once (4 8 16 32)")
    made.add_argument("--prefix-tokens", type=int, default=2000, metavar="P", help="behind each (%(default)s)")
    made.add_argument("--output-tokens", type=int, default=200, metavar="T", help="of each (%(default)s)")
    made.add_argument("--rounds", type=int, default=3, metavar="R", help="in turns, the middle of which counts (3)")
    made.add_argument("--out", type=Path, default=Path("out/shared-prefix"), help="default: %(default)s")
    return made


@contextlib.contextmanager
def engine_at(url: str | None, work: Workspace) -> Iterator[str]:
    """The engine to measure."""
    if url is not None:
        yield str(origin_of(url))
        return
    with engine("vllm", work, EngineSettings(HIDDEN, LAYERS)) as own_url:
        yield own_url


def step_ms(trace: Path) -> float:
    """Middle gap between tokens while every request of a trace was being answered. Raises SystemExit if none was."""
    answers = [[ms for ms in seen_tokens(record) if not math.isnan(ms)] for record in load_trace(trace)[1]]
    all_ms = max((seen[0] if seen else math.inf) for seen in answers)
    until_ms = min((seen[-1] if seen else 0.0) for seen in answers)
    gaps = [
        after - before for seen in answers for before, after in pairwise(seen) if before >= all_ms and after <= until_ms
    ]
    if not gaps:
        raise SystemExit(f"{trace}: the first answer ended before the last began; expected more --output-tokens")
    return statistics.median(gaps)


def measure(args: argparse.Namespace, url: str, work: Workspace) -> list[tuple[int, float, float]]:
    """Answers at once, ms of a step behind a shared prefix, ms behind prompts of their own."""
    found: dict[tuple[int, str], list[float]] = {}
    prompts = {
        "shared": f"--prefix-count 1 --prefix-tokens {args.prefix_tokens} --prompt-tokens {NEW_TOKENS}",
        "own": f"--prompt-tokens {args.prefix_tokens + NEW_TOKENS}",
    }
    for number in range(args.rounds):
        for answers in args.answers:
            for kind, flags in prompts.items():
                work.empty_cache(url)
                trace = work.path(f"{kind}-{answers}-{number}.jsonl.zst")
                load = f"--pattern burst --burst-size {answers} --number {answers} --burst-every 1s --seed {number}"
                more = f"--output-tokens {args.output_tokens} -o {trace} --overwrite"
                work.run(f"{kind} {answers}", ["loadgen", "--url", url, *f"{load} {flags} {more}".split(), *work.way])
                found.setdefault((answers, kind), []).append(step_ms(trace))
    middle = {key: statistics.median(times_ms) for key, times_ms in found.items()}
    return [(answers, middle[answers, "shared"], middle[answers, "own"]) for answers in args.answers]


def table(rows: Sequence[tuple[int, float, float]]) -> str:
    """In Markdown."""
    lines = [
        "| answers at once | step on a shared prefix, ms | on prompts of their own, ms | shared over own |",
        "|---" * 4 + "|",
    ]
    lines += [f"| {answers} | {shared:.1f} | {own:.1f} | {shared / own:.2f} |" for answers, shared, own in rows]
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that the engine is stopped too
    work = Workspace.of(args)
    work.directory.mkdir(parents=True, exist_ok=True)
    load_core, _ = measuring_cores()
    with on_core(load_core if args.url is None else None), engine_at(args.url, work) as url:
        print("\n" + table(measure(args, url, work)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
