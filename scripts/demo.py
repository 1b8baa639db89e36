"""The main job from nothing to one page: capture → replay warm and cold → fit → predict → report.

    python -m scripts.demo --engine sim    # on the embedded engine, about three minutes
    python -m scripts.demo --engine vllm   # on a real vLLM on this machine's CPU, about thirteen

The model is fitted on calibration captures alone; the session load that the page shows is one that the fit never saw.
A calibration comes before, between and after the loads: an engine whose pace drifts over the minutes is then fitted at
the pace that the loads met, and the calibrations' spread is that of the loads. The last lines are those of ``sim
validate``: each forecast's error and verdict, and what to do next.
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
    """Flags of loadgen for the calibration captures, but for their seeds, and for the load that is predicted."""

    calibration: str
    """Up to the longest prompt of ``session``, and to as many outputs at once as its cold replay."""
    session: str


# Small enough for three minutes in all; the embedded engine prefills about 12,000 tokens a second.
SIM_LOADS = Loads(
    calibration="--pattern calibration --prompt-tokens 64:5000 --parallel 8 --duration 25s",
    session="--pattern multiturn --turns 4 --rate 0.9 --duration 18s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 4000 --prompt-tokens 64:256 --output-tokens 16:48",
)
# The real engine: two prefixes of 10,000 tokens and five turns, as an assistant with a long system prompt would see.
VLLM_LOADS = Loads(
    # Two rounds. Fewer than three captures would leave the drift between them open: bands of ± 90 %.
    calibration="--pattern calibration --prompt-tokens 64:10900 --parallel 16 --number 260",
    session="--pattern multiturn --turns 5 --rate 0.3 --duration 60s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 10000 --prompt-tokens 64:256 --output-tokens 16:64",
)
LOADS: dict[EngineKind, Loads] = {"sim": SIM_LOADS, "vllm": VLLM_LOADS}


@contextlib.contextmanager
def engine(kind: EngineKind, work: Workspace) -> Iterator[str]:
    """The engine under study, for the length of the ``with`` block; gives its URL."""
    if kind == "vllm":
        shape = vllm_engine.ModelShape()
        vllm_engine.install(shape)
        print("\n── engine: starting vLLM on this machine's CPU (about a minute)", flush=True)
        with vllm_engine.running_vllm(shape, work.log("engine")) as own_url:
            yield own_url
    else:
        address = f"127.0.0.1:{free_port()}"
        command = ["sim", "serve", "--listen", address, "--block-size", "32", "--num-gpu-blocks", "4096"]
        with work.serving("engine", command, f"http://{address}") as own_url:
            yield own_url


def capture(work: Workspace, engine_url: str, name: str, load: str, *tap_flags: str) -> Path:
    """Send one load through a tap in front of the engine, emptied before; returns the tap's trace."""
    trace = work.path(f"{name}.jsonl.zst")
    work.empty_cache(engine_url)
    address = f"127.0.0.1:{free_port()}"
    tap: Command = ["tap", "--upstream", engine_url, *tap_flags, "--listen", address, "-o", trace, "--tokenizer", "ids"]
    with work.serving(f"{name} tap", tap, f"http://{address}") as tap_url:
        client_trace = work.path(f"{name}-client.jsonl.zst")
        work.run(f"{name} load", ["loadgen", "--url", tap_url, "-o", client_trace, *load.split()])
    return trace


def run_job(kind: EngineKind, work: Workspace) -> tuple[Path, list[str]]:
    """Run all stages of the main job; return the page, and lines on the forecasts."""
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
    judged = work.path("validation.json")
    cold: Command = ["--cold", labelled["cold-replayed"], "--json"]
    work.run(
        "validate",
        ["sim", "validate", captured, "--latency-model", model, *cold],
        accept=(0, 1, UNCERTAIN),
        stdout=judged,
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
    return page, verdict_lines(msgspec.json.decode(judged.read_bytes(), type=Comparison))


def verdict_lines(result: Comparison) -> list[str]:
    """Return the outcome of each forecast, and the next steps where a gate failed; ``result``: of ``sim validate``."""
    labels = [label for label, one in result.forecasts.items() if one.pace is None]
    outcomes = [line for label in labels for line in result.headline if line.startswith(f"{label} against ")]
    return [*outcomes, *result.next_steps]


def main() -> int:
    """Run the job and say where its page is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sim", "vllm"], default="sim", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="a directory, made anew")
    args = parser.parse_args()
    work = Workspace(args.out.resolve())
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    # The engine, when it is a real one, has a core to itself; everything else shares the other.
    load_core, _ = measuring_cores() if args.engine == "vllm" else (None, None)
    with on_core(load_core):
        page, lines = run_job(args.engine, work)
    print(f"\nThe page: {page.as_uri()}", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
