"""``loadgen selftest``: what this machine can send, and how true its times are, in under a minute."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracefile.commandline.durations import duration
from tracefile.commandline.parser import Parser
from tracefile.commandline.printing import print_result
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    from loadgen.core import capacity
    from loadgen.core.capacity import Capacity, RateTruth
    from loadgen.selftest import measuring
else:  # the runs, which the flags need not
    capacity, measuring = LateModule("loadgen.core.capacity"), LateModule("loadgen.selftest.measuring")

SHORTEST_S = 0.5
LONGEST_S = 30.0

EPILOG = """\
loadgen runs here as it always does, against a built-in server on this machine that knows the truth. Later runs of
loadgen and replay say which share of it they offered. Not to be confused with the load that a model is fitted on.

examples:
  loadgen selftest --procs 2
"""


def parser() -> Parser:
    made = Parser(prog="loadgen selftest", description=__doc__.partition(": ")[2], epilog=EPILOG)
    made.add_argument("--procs", type=int, default=1, help="sender processes, as in the runs to come")
    made.add_argument("--duration", type=duration, default="4s", help="duration of each of five runs")
    made.add_argument("--json", action="store_true", help="print the result as one JSON object; the text on stderr")
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    if not SHORTEST_S <= args.duration <= LONGEST_S or args.procs < 1:
        raise InputError(f"--duration, --procs: {args.duration:g} s, {args.procs}; expected 0.5s to 30s, and 1 or more")
    with tempfile.TemporaryDirectory(prefix="kvtape-selftest-") as folder:
        found = measuring.measure_capacity(args.duration, args.procs, Path(folder), _tell)
    print_result(found, [*capacity_lines(found), _keep(found)], as_json=args.json)
    return 0


def capacity_lines(found: "Capacity") -> list[str]:
    senders = "1 sender" if found.procs == 1 else f"{found.procs} senders"
    return [
        f"{found.machine}: {senders}, beside the built-in server",
        f"  most requests       {found.requests_per_s:>12,.0f} /s   streams of 16 tokens, prompts of 256",
        f"  most events         {found.events_per_s:>12,.0f} /s   streams of 256 tokens",
        f"  most prompt tokens  {found.prompt_tokens_per_s:>12,.0f} /s   prompts of 8,192",
        f"  per core            {found.requests_per_core_s:>12,.0f} /s   or {found.events_per_core_s:,.0f} events/s",
        *map(_rate_line, found.at_rates),
    ]


def _rate_line(at: "RateTruth") -> str:
    error = f"TTFT error p50 {_ms(at.ttft_error_p50_ms)} p99 {_ms(at.ttft_error_p99_ms)}"
    lag = f"lag p50 {_ms(at.lag_p50_ms)} p99 {_ms(at.lag_p99_ms)}"
    return f"  at {at.rate:>3g} requests/s    {error}; {lag} ms; {at.client_cpu:.0%} of a core"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _keep(found: "Capacity") -> str:
    try:
        return f"kept in {capacity.save_capacity(found)}"
    except OSError as error:
        return f"warning: {error.filename}: cannot write ({error.strerror or error})"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
