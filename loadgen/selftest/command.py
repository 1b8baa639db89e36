"""``loadgen selftest``: what this machine can send, and how true its times are, in under a minute."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen.core.capacity import Calibration, RateTruth, save_calibration
from loadgen.selftest.runs import calibrate
from tracefile import InputError
from tracefile.commandline.parser import Parser

SECONDS = 4.0
SHORTEST_S = 0.5
EPILOG = """\
loadgen runs here as it always does, against a built-in server on this machine that knows the truth. Later runs of
loadgen and replay say which share of it they offered. Not to be confused with the load that a model is fitted on.
"""


def parser() -> Parser:
    """Return the parser of ``loadgen selftest``."""
    made = Parser(prog="loadgen selftest", description=__doc__, epilog=EPILOG)
    made.add_argument("--procs", type=int, default=1, metavar="N", help="senders, as in the runs to come (1)")
    made.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of each of five runs (4)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the calibration here as JSON too")
    return made


def main(argv: Sequence[str]) -> int:
    """Measure, print, keep."""
    args = parser().parse_args(argv)
    if not SHORTEST_S <= args.seconds <= 30 or args.procs < 1:
        raise InputError(f"--seconds, --procs: {args.seconds:g}, {args.procs}; expected 0.5 to 30, and 1 or more")
    with tempfile.TemporaryDirectory(prefix="kvtape-calibrate-") as folder:
        found = calibrate(args.seconds, args.procs, Path(folder), _tell)
    print("\n".join(calibration_lines(found)))
    _keep(found, args.json)
    return 0


def calibration_lines(found: Calibration) -> list[str]:
    """The calibration for a terminal."""
    senders = "1 sender" if found.procs == 1 else f"{found.procs} senders"
    return [
        f"{found.machine}: {senders}, beside the built-in server",
        f"  most requests       {found.requests_per_s:>12,.0f} /s   streams of 16 tokens, prompts of 256",
        f"  most events         {found.events_per_s:>12,.0f} /s   streams of 256 tokens",
        f"  most prompt tokens  {found.prompt_tokens_per_s:>12,.0f} /s   prompts of 8,192",
        f"  per core            {found.requests_per_core_s:>12,.0f} /s   or {found.events_per_core_s:,.0f} events/s",
        *map(_rate_line, found.at_rates),
    ]


def _rate_line(at: RateTruth) -> str:
    error = f"TTFT error p50 {_ms(at.ttft_error_p50_ms)} p99 {_ms(at.ttft_error_p99_ms)}"
    lag = f"lag p50 {_ms(at.lag_p50_ms)} p99 {_ms(at.lag_p99_ms)}"
    return f"  at {at.rate:>3g} requests/s    {error}; {lag} ms; {at.client_cpu:.0%} of a core"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _keep(found: Calibration, file: Path | None) -> None:
    try:
        print(f"kept in {save_calibration(found)}")
        if file is not None:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError as error:
        print(f"warning: {error.filename}: cannot write ({error.strerror or error})", file=sys.stderr)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
