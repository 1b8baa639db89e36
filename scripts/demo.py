"""The complete job: capture → replay warm and cold → fit → predict → report, with one HTML page.

    python -m scripts.demo --engine sim    # on the embedded engine, about three minutes
    python -m scripts.demo --engine vllm   # on a real vLLM on this machine's CPU, about thirteen

The latency model is fitted only to calibration captures; the page shows a session load that the fit did not use.
Calibrations run before, between and after the loads: if the engine's speed drifts, the fit and its spread cover the
loads. The last lines come from ``sim validate``: error and verdict of each forecast, and next steps.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from report.compare.results import Comparison
from scripts import vllm_engine
from scripts.job import Command, Workspace
from scripts.processes import free_port, measuring_cores, on_core
from tracefile.commandline.exit_codes import UNCERTAIN

EngineKind = Literal["sim", "vllm"]


@dataclass(frozen=True, slots=True)
class Loads:
    """loadgen flags (prompt tokens, arrivals) of the calibration captures, without seeds, and of the predicted load."""

    calibration: str
    """Covers the longest prompt of ``session``, and the concurrency of its cold replay."""
    session: str


# Three minutes in total; the embedded engine prefills about 12,000 tokens a second.
SIM_LOADS = Loads(
    calibration="--pattern calibration --prompt-tokens 64:5000 --parallel 8 --duration 25s",
    session="--pattern multiturn --turns 4 --rate 0.9 --duration 18s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 4000 --prompt-tokens 64:256 --output-tokens 16:48",
)
# The real engine: two prefixes of 10,000 tokens and five turns, like an assistant with a long system prompt.
VLLM_LOADS = Loads(
    # Two rounds. With fewer than three captures, the drift is unknown: bands of ± 90 %.
    calibration="--pattern calibration --prompt-tokens 64:10900 --parallel 16 --number 260",
    session="--pattern multiturn --turns 5 --rate 0.3 --duration 60s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 10000 --prompt-tokens 64:256 --output-tokens 16:64",
)
LOADS: dict[EngineKind, Loads] = {"sim": SIM_LOADS, "vllm": VLLM_LOADS}


@contextlib.contextmanager
def engine(kind: EngineKind, work: Workspace) -> Iterator[str]:
    """Run the engine within the ``with`` block and yield its URL."""
    if kind == "vllm":
        shape = vllm_engine.ModelShape()
        vllm_engine.install(shape)
        print("\n── engine: starting vLLM on this machine's CPU (about a minute)", flush=True)
        with vllm_engine.running_vllm(shape, work.log("engine")) as url:
            yield url
    else:
        address = f"127.0.0.1:{free_port()}"
        command = ["sim", "serve", "--listen", address, "--block-size", "32", "--num-gpu-blocks", "4096"]
        with work.serving("engine", command, f"http://{address}") as url:
            yield url


def capture(work: Workspace, engine_url: str, name: str, load: str, *tap_flags: str) -> Path:
    """Reset the prefix cache, send a load through a tap to the engine, and return the tap's trace."""
    trace = work.path(f"{name}.jsonl.zst")
    work.empty_cache(engine_url)
    address = f"127.0.0.1:{free_port()}"
    tap: Command = ["tap", "--upstream", engine_url, *tap_flags, "--listen", address, "-o", trace, "--tokenizer", "ids"]
    with work.serving(f"{name} tap", tap, f"http://{address}") as tap_url:
        client_trace = work.path(f"{name}-client.jsonl.zst")
        work.run(f"{name} load", ["loadgen", "--url", tap_url, "-o", client_trace, *load.split()])
    return trace


def run_job(kind: EngineKind, work: Workspace) -> tuple[Path, list[str]]:
    """Run all stages; return the page, and lines with the verdicts of the forecasts."""
    loads = LOADS[kind]
    labelled: dict[str, Path] = {}
    calibrations: list[Path] = []

    def calibrate() -> None:
        number = len(calibrations) + 1
        calibrations.append(capture(work, url, f"calibration-{number}", f"{loads.calibration} --seed {10 + number}"))

    with engine(kind, work) as url:
        calibrate()
        labelled["captured"] = captured = capture(work, url, "captured", loads.session)
        calibrate()
        for name, flags in {"replayed": ["--reset-cache"], "cold-replayed": ["--cold-prompts"]}.items():
            labelled[name] = work.path(f"{name}.jsonl.zst")
            work.run(name, ["replay", captured, "--url", url, "--replay-sessions", *flags, "-o", labelled[name]])
        calibrate()
    model = work.path("model.json")
    scheduler = ["--max-num-seqs", "32", "--max-num-batched-tokens", "2048"]
    work.run("fit", ["sim", "calibrate", *calibrations, *scheduler, "-o", model])
    validation = work.path("validation.json")
    cold: Command = ["--cold", labelled["cold-replayed"], "--json"]
    work.run(
        "validate",
        ["sim", "validate", captured, "--latency-model", model, *cold],
        accept=(0, 1, UNCERTAIN),
        stdout=validation,
    )
    for name, flags in {"predicted": [], "cold-predicted": ["--cold-prompts"]}.items():
        labelled[name] = work.path(f"{name}.jsonl.zst")
        work.run(
            name,
            ["sim", "run", captured, "--latency-model", model, "--replay-sessions", *flags, "-o", labelled[name]],
        )
    page = work.path("report.html")
    traces = [f"{label}={path}" for label, path in labelled.items()]
    print(
        work.run(
            "report",
            ["report", "compare", *traces, "--html", page, "--json"],
            stdout=work.path("report.json"),
        )
    )
    return page, verdict_lines(msgspec.json.decode(validation.read_bytes(), type=Comparison))


def verdict_lines(result: Comparison) -> list[str]:
    """Return the verdict of each forecast, and next steps after a failed gate; ``result``: of ``sim validate``."""
    labels = [label for label, forecast in result.forecasts.items() if forecast.pace is None]
    outcomes = [line for label in labels for line in result.headline if line.startswith(f"{label} against ")]
    return [*outcomes, *result.next_steps]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sim", "vllm"], default="sim", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="output folder, replaced")
    args = parser.parse_args()
    work = Workspace(args.out.resolve())
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    # A real engine has its own core; everything else shares the other.
    load_core, _ = measuring_cores() if args.engine == "vllm" else (None, None)
    with on_core(load_core):
        page, lines = run_job(args.engine, work)
    print("", *lines, f"page: {page.as_uri()}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
