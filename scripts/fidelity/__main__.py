"""Forecasts compared with captures of real engines: capture a round, then evaluate forecasts of unseen loads.

    python -m scripts.fidelity capture out/128x2 --model 128x2                # vLLM on this machine's CPU
    python -m scripts.fidelity capture out/gpu --engine vllm-gpu --model 4096x36 --wheels wheels --budget 25m
    python -m scripts.fidelity evaluate out/128x2 out/gpu                        # from files, without an engine
    python -m scripts.fidelity evaluate data/captures/*/                         # the rounds of docs/dev/results.md

Complete captures are kept after Ctrl-C: the same command continues with the missing captures. No capture begins that
would exceed the budget. docs/dev/gpu.md describes a machine with a GPU.
"""

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

SITE = Path.home() / ".cache" / "kvtape" / "wheels"


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = root.add_subparsers(dest="action", required=True)
    capture = actions.add_parser("capture")
    capture.add_argument("folder", type=Path, help="folder of the round; existing captures are kept")
    capture.add_argument("--engine", choices=["vllm", "vllm-gpu", "sglang", "sim"], default="vllm")
    capture.add_argument("--model", default="128x2", help="hidden x layers (default: %(default)s; Qwen3-8B: 4096x36)")
    capture.add_argument("--wheels", type=Path, metavar="DIR", help="wheels to install first (default: none)")
    capture.add_argument("--budget", metavar="TIME", help="time limit of this command (default: none)")
    evaluate = actions.add_parser("evaluate")
    evaluate.add_argument("folders", type=Path, nargs="+", help="folders of rounds")
    evaluate.add_argument("--out", type=Path, default=Path("out/evaluated"), help="default: %(default)s")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    began_s, args = time.monotonic(), parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that engines are stopped too
    return _evaluate(args) if args.action == "evaluate" else _capture(args, began_s)


def _capture(args: argparse.Namespace, began_s: float) -> int:
    if (shape := re.fullmatch(r"(\d+)x(\d+)", args.model)) is None:
        parser().error(f"--model {args.model}: expected HIDDENxLAYERS")
    if args.wheels is not None:
        install_wheels(args.wheels)
    from scripts.fidelity.capturing import capture_round
    from scripts.processes import measuring_cores, on_core
    from tracefile.commandline.durations import duration

    try:
        ends_s = float("inf") if args.budget is None else began_s + duration(args.budget)
    except argparse.ArgumentTypeError as error:
        parser().error(f"--budget: {error}")
    # An engine on the CPU has its own core; everything else shares the other.
    with nullcontext() if args.engine == "vllm-gpu" else on_core(measuring_cores()[0]):
        remaining = capture_round(args.engine, args.folder.resolve(), int(shape[1]), int(shape[2]), ends_s)
    print(f"{remaining} captures are missing: run the command again" if remaining else "all captures are complete")
    return 0


def install_wheels(wheels: Path) -> None:
    """Install wheels without a network, ahead of this Python's packages; its torch is still used."""
    files = sorted(wheels.glob("*.whl"))
    if not files:
        sys.exit(f"--wheels {wheels}: no wheels; expected *.whl")
    done, names = SITE / "ready", "\n".join(file.name for file in files)
    if not done.exists() or done.read_text() != names:
        print(f"Installing {len(files)} wheels into {SITE} (once) ...", flush=True)
        flags = ["-m", "pip", "--quiet", "install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target"]
        subprocess.run([sys.executable, *flags, SITE, *files], check=True)
        done.write_text(names)
    sys.path.insert(0, str(SITE))
    importlib.invalidate_caches()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))


def _evaluate(args: argparse.Namespace) -> int:
    from scripts.fidelity.evaluation import evaluate_round, tables

    text = tables([cell for folder in args.folders for cell in evaluate_round(folder.resolve(), args.out.resolve())])
    (args.out / "verdicts.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
