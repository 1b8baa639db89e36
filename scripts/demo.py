"""The main job from nothing to one page: capture → replay warm and cold → fit → predict → report.

    python -m scripts.demo --engine sim    # on the embedded engine, under three minutes
    python -m scripts.demo --engine vllm   # on a real vLLM on this machine's CPU, about ten
    python -m scripts.demo --url https://gateway/team-a/v1 --ca ca.pem    # on an idle engine that is there

The model is fitted on calibration captures alone; the session load that the page shows is one that the fit never saw.
The last line says if ``sim validate`` finds the captures within the forecasts' bands, or why not. ``--again`` captures
that load twice, so that the page can say how far two runs of the same load on the same engine lie apart: the yardstick
for every prediction.
"""

import argparse
import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from loadgen.core.request import origin_of
from measure.wording import listed
from report.compare.ensembles import counted_cohorts
from report.compare.results import Comparison
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
    calibrations=tuple(
        f"--pattern calibration --prompt-tokens 64:4500 --parallel 8 --duration 20s --seed {seed}" for seed in (11, 12)
    ),
    session="--pattern multiturn --turns 4 --rate 0.9 --duration 18s --seed 1 --think 0.2s:1.0s"
    " --prefix-count 2 --prefix-tokens 4000 --prompt-tokens 64:256 --output-tokens 16:48",
)
# The real engine: two prefixes of 10,000 tokens and five turns, as an assistant with a long system prompt would see.
VLLM_LOADS = Loads(
    # One round each, up to the prompts and to more outputs at once than the session load has. Two captures alone would
    # leave the drift between them open: bands of ± 90 %.
    calibrations=tuple(f"--pattern calibration --parallel 16 --number 130 --seed {seed}" for seed in (11, 12, 13)),
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


def capture(work: Workspace, engine_url: str, name: str, load: str, *tap_flags: str) -> Path:
    """Send one load through a tap in front of the engine, emptied before; returns the tap's trace."""
    trace = work.path(f"{name}.jsonl.zst")
    work.empty_cache(engine_url)
    address = f"127.0.0.1:{free_port()}"
    tap: Command = ["tap", "--upstream", engine_url, *tap_flags, "--listen", address, "-o", trace, "--tokenizer", "ids"]
    with work.serving(f"{name} tap", [*tap, *work.way], f"http://{address}") as tap_url:
        client_trace = work.path(f"{name}-client.jsonl.zst")
        work.run(f"{name} load", ["loadgen", "--url", tap_url, "-o", client_trace, *load.split(), *work.way])
    return trace


def run_job(kind: EngineKind, work: Workspace, at: str | None, *, again: bool) -> tuple[Path, str]:
    """Run all stages of the main job; return the page, and a line on the forecasts."""
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
    judged = work.path("validation.json")
    cold: Command = ["--cold", labelled["cold-replayed"], "--json"]
    work.run("validate", ["sim", "validate", captured, "--latency-model", model, *cold], accept=(0, 1), stdout=judged)
    return page, verdict_line(msgspec.json.decode(judged.read_bytes(), type=Comparison))


WITHIN = "within band"


def verdict_line(result: Comparison) -> str:
    """Return ``within band``, or the cohorts that are not and the likeliest reason; ``result``: of ``sim validate``."""
    found = {
        f"{label} {cohort}": verdict
        for label, forecast in result.forecasts.items()
        if forecast.pace is None
        for cohort, cell in counted_cohorts(result.pairs[label].cohorts).items()
        if (verdict := cell.ttft.verdict) is not None
    }
    if not found:
        return "forecasts: not judged, as no cohort has enough requests"
    off = [f"{name}: {verdict}" for name, verdict in found.items() if verdict != WITHIN]
    if not off:
        return f"forecasts: {WITHIN} in all {len(found)} cohorts, warm and cold"
    reasons = [
        f"steps of {result.pairs[label].truth} took {one.pace:.2f} of their time in calibration"
        for label, one in result.forecasts.items()
        if one.pace is not None
    ]
    said = "; ".join([*reasons, *result.next_steps]) or "TTFT at p50, p90 or p99 alone"
    return f"forecasts: {len(off)} of {len(found)} cohorts outside their bands ({listed(off)}): {said}"


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
        page, verdict = run_job(args.engine, work, args.url, again=args.again)
    print(f"\nThe page: {page.as_uri()}\n{verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
