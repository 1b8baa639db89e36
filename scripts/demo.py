"""The main job from nothing to one page: capture → replay warm and cold → fit → predict → report.

    python -m scripts.demo --engine sim    # on the embedded engine, under three minutes
    python -m scripts.demo --engine vllm   # on a real vLLM on this machine's CPU, about fifteen
    python -m scripts.demo --url https://gateway/team-a/v1 --ca ca.pem    # on an idle engine that is there

The model is fitted on calibration captures alone (other seeds, other patterns); the session load that the page shows
is one that the fit never saw. ``--again`` captures that load twice, so that the page can say how far two runs of the
same load on the same engine lie apart: the yardstick for every prediction.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadgen.core.request import origin_of
from scripts import vllm_engine
from scripts.engine_home import measuring_cores, on_core
from scripts.job import Command, Workspace, add_engine_arguments
from scripts.proxybench.processes import free_port

EngineKind = Literal["sim", "vllm"]


@dataclass(frozen=True, slots=True)
class Loads:
    """Flags of loadgen for each calibration capture and for the load that is predicted."""

    calibrations: Sequence[str]
    session: str


# Small enough for three minutes in all; the embedded engine prefills about 12,000 tokens a second.
SIM_LOADS = Loads(
    calibrations=(
        "--pattern multiturn --turns 2 --rate 1.2 --duration 14s --seed 11"
        " --prompt-tokens 64:3000 --output-tokens 8:24",
        "--pattern poisson --rate 4 --duration 12s --seed 12"
        " --prefix-count 4 --prefix-tokens 800 --prompt-tokens 32:1200 --output-tokens 8:32",
    ),
    session="--pattern multiturn --turns 4 --rate 0.9 --duration 18s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 4000 --prompt-tokens 64:256 --output-tokens 16:48",
)
# The real engine: two prefixes of 10,000 tokens and five turns, as an assistant with a long system prompt would see.
VLLM_LOADS = Loads(
    calibrations=(
        "--pattern multiturn --turns 2 --parallel 1 --number 40 --seed 11 --think 0.3s"
        " --prompt-tokens 64:5500 --output-tokens 8:48",
        "--pattern poisson --rate 1.5 --duration 60s --seed 12"
        " --prefix-count 4 --prefix-tokens 2000 --prompt-tokens 32:1500 --output-tokens 8:64",
    ),
    session="--pattern multiturn --turns 5 --rate 0.3 --duration 60s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 10000 --prompt-tokens 64:256 --output-tokens 16:64",
)
LOADS: dict[EngineKind, Loads] = {"sim": SIM_LOADS, "vllm": VLLM_LOADS}


@contextlib.contextmanager
def engine(kind: EngineKind, work: Workspace, url: str | None = None) -> Iterator[str]:
    """The engine under study, for the length of the ``with`` block; gives its URL."""
    if url is not None:
        yield str(origin_of(url))
    elif kind == "vllm":
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


def capture(work: Workspace, engine_url: str, name: str, load: str) -> Path:
    """Send one load through a tap in front of the engine; returns the tap's trace."""
    trace = work.path(f"{name}.jsonl.zst")
    work.empty_cache(engine_url)
    address = f"127.0.0.1:{free_port()}"
    tap: Command = ["tap", "--upstream", engine_url, "--listen", address, "-o", trace, "--tokenizer", "ids", *work.way]
    with work.serving(f"{name} tap", tap, f"http://{address}") as tap_url:
        client_trace = work.path(f"{name}-client.jsonl.zst")
        work.run(f"{name} load", ["loadgen", "--url", tap_url, "-o", client_trace, *load.split(), *work.way])
    return trace


def run_job(kind: EngineKind, work: Workspace, at: str | None, *, again: bool) -> Path:
    """Run all stages of the main job; returns the page."""
    loads = LOADS[kind]
    labelled: dict[str, Path] = {}
    with engine(kind, work, at) as url:
        calibrations = [
            capture(work, url, f"calibration-{number}", load) for number, load in enumerate(loads.calibrations, 1)
        ]
        labelled["captured"] = captured = capture(work, url, "captured", loads.session)
        if again:
            labelled["again"] = capture(work, url, "again", loads.session)
        for name, flags in {"replayed": ["--reset-cache"], "cold-replayed": ["--cold-prompts"]}.items():
            labelled[name] = work.path(f"{name}.jsonl.zst")
            replay: Command = [
                "replay",
                captured,
                "--url",
                url,
                "--replay-sessions",
                *flags,
                "-o",
                labelled[name],
                *work.way,
            ]
            work.run(name, replay)
    model = work.path("model.json")
    scheduler = [] if at else ["--max-num-seqs", "32", "--max-num-batched-tokens", "2048"]
    work.run("fit", ["sim", "fit", *calibrations, *scheduler, "-o", model])
    for name, flags in {"predicted": [], "cold-predicted": ["--cold-prompts"]}.items():
        labelled[name] = work.path(f"{name}.jsonl.zst")
        work.run(
            name,
            ["sim", "run", captured, "--latency-model", model, "--replay-sessions", *flags, "-o", labelled[name]],
        )
    page = work.path("report.html")
    traces = [f"{label}={path}" for label, path in labelled.items()]
    against = ["--truth", "cold-predicted=cold-replayed"]
    print(
        work.run(
            "report",
            ["report", "compare", *traces, *against, "--html", page, "--json"],
            stdout=work.path("report.json"),
        )
    )
    return page


def main() -> int:
    """Run the job and say where its page is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sim", "vllm"], default="sim", help="with --url: its loads (sim)")
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="a directory, made anew")
    parser.add_argument("--again", action="store_true", help="capture the session load twice (the A/A yardstick)")
    args = parser.parse_args()
    work = Workspace.of(args)
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    # The engine, when it is a real one, has a core to itself; everything else shares the other.
    load_core, _ = measuring_cores() if args.engine == "vllm" and args.url is None else (None, None)
    with on_core(load_core):
        page = run_job(args.engine, work, args.url, again=args.again)
    print(f"\nThe page: {page.as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
