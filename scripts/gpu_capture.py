"""Captures of a real engine on a machine with a GPU, in one command that needs no network.

    python -m scripts.gpu_capture --wheels wheels --out captures --budget 25m
    python -m scripts.matrix judge --captures captures --out results    # anywhere, later

Starts vLLM with a Qwen3-8B of random weights (``--shape``: another size), probes it for seconds, and sizes the loads to
it: three calibrations, then three gates, warm and cold, each captured three times; the most valuable first. Each
capture is kept with its manifest as soon as it is whole. No capture begins that the budget has no room for; the same
command goes on with those that are left. docs/dev/gpu.md tells how to get the wheels.
"""

import argparse
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.wheels import install_wheels


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--wheels", type=Path, metavar="DIR", help="install these first (default: this Python has vLLM)")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="captures, with what is there already")
    made.add_argument("--budget", default="25m", metavar="TIME", help="of this command (default: %(default)s)")
    made.add_argument("--shape", default="4096x36", help="the model, hidden x layers (default: %(default)s: Qwen3-8B)")
    made.add_argument(
        "--engine", choices=["vllm-gpu", "vllm", "sim"], default="vllm-gpu", help="vllm: on the CPU (default: vllm-gpu)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Install, then capture what is missing and the budget has room for."""
    began_s, args = time.monotonic(), parser().parse_args(argv)
    if re.fullmatch(r"\d+x\d+(-[\w-]+)?", args.shape) is None:
        parser().error(f"--shape {args.shape}: expected HIDDENxLAYERS, or HIDDENxLAYERS-NAME for another round of it")
    if args.wheels is not None:
        install_wheels(args.wheels)
    # The wheels hold what these import.
    from scripts.fidelity.capturing import capture_sized  # noqa: PLC0415
    from tracefile.commandline.durations import duration  # noqa: PLC0415

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that engines are stopped too
    try:
        ends_s = began_s + duration(args.budget)
    except argparse.ArgumentTypeError as error:
        parser().error(f"--budget: {error}")
    left = capture_sized(args.engine, args.out.resolve(), args.shape, ends_s)
    print(f"{left} captures are left: the same command goes on" if left else "all captures are made")
    return 0


if __name__ == "__main__":
    sys.exit(main())
