"""Ground truth over sockets: an engine with known parameters, captured through the tap, fitted, and compared.

    python -m scripts.truth [--seed K] [--number N] [--keep FOLDER]

`sim serve` keeps the built-in model's time, `tap` records what `loadgen --pattern calibration` sends it, and `sim
calibrate` learns from the capture alone. Sockets and HTTP take time of their own, which no capture tells from the API
server's: it is measured on an engine whose steps cost nothing, and added to the truth. Prints each parameter's truth
beside what was found; exit status 1 if one is neither within 5 % nor inside its interval. Needs an idle machine for
some minutes: other work on it is time that the engine's model does not know.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from scripts.fidelity.loads import SCHEDULER
from scripts.job import Command, Workspace
from scripts.proxybench.processes import free_port
from sim.latency.modelfile import Model, Parameter, default_model, load_model, make_model, save_model
from tracefile import load_trace

NEAR = 0.05
PATH_TOKENS = (64, 8000)
"""Prompts that the path alone is measured with; single ones, as the calibration's are that tell of the API server."""
BASE, PER_TOKEN = "frontend_base_ms", "frontend_ms_per_prompt_token"


def main() -> int:
    """Capture, fit, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the load (1)")
    parser.add_argument("--number", type=int, help="sessions (three rounds)")
    parser.add_argument("--keep", type=Path, help="folder for the captures and the model")
    args = parser.parse_args()
    with contextlib.nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as folder:
        work = Workspace(Path(folder).resolve())
        work.directory.mkdir(parents=True, exist_ok=True)
        path = measure_path(work)
        print(f"sockets and HTTP: {path.base_ms:.2f} ms a request, {path.per_token_ms:.6f} ms a prompt token")
        load = ["--pattern", "calibration", "--seed", str(args.seed)]
        load += ["--number", str(args.number)] if args.number else []
        capture = captured(work, "calibration", known_engine(), load)
        return compare(path.added_to(known_engine()), fitted(work, capture))


@dataclass(frozen=True, slots=True)
class SocketPath:
    """Time of a request on its way, which the engine's model does not know."""

    base_ms: float
    per_token_ms: float

    def added_to(self, model: Model) -> Model:
        """The model as a capture of it shows it."""
        own = model.parameters
        more = {BASE: own[BASE].value + self.base_ms, PER_TOKEN: own[PER_TOKEN].value + self.per_token_ms}
        changed = {name: msgspec.structs.replace(own[name], value=value) for name, value in more.items()}
        return msgspec.structs.replace(model, parameters={**own, **changed})


def measure_path(work: Workspace) -> SocketPath:
    """Return the TTFT of single requests to an engine whose steps cost nothing, beyond its API server's time."""
    known = known_engine().parameters
    server = {name: known[name].value for name in (BASE, PER_TOKEN)}
    stepless = make_model({**dict.fromkeys(known, 0.0), **server}, known_engine().engine)
    over_ms = []
    for tokens in PATH_TOKENS:
        load = ["--pattern", "constant", "--rate", "8", "--number", "40", "--prompt-tokens", str(tokens)]
        capture = captured(work, f"path-{tokens}", stepless, [*load, "--output-tokens", "1", "--seed", "1"])
        ttft_ms = median(record.ttft_ms for record in load_trace(capture)[1] if record.ttft_ms is not None)
        over_ms.append(ttft_ms - server[BASE] - tokens * server[PER_TOKEN])
    per_token_ms = (over_ms[1] - over_ms[0]) / (PATH_TOKENS[1] - PATH_TOKENS[0])
    return SocketPath(over_ms[0] - PATH_TOKENS[0] * per_token_ms, per_token_ms)


def known_engine() -> Model:
    """Return the built-in model with prices of shared context and of rests, away from their defaults."""
    model = default_model()
    costs = {"per_kv_token_ms": 2e-4, "per_repeated_kv_token_ms": 5e-5}
    costs |= {"rested_step_ms": 2.0, "per_rested_depth_ms": 1.2e-3}
    return make_model({**{name: one.value for name, one in model.parameters.items()}, **costs}, model.engine)


def captured(work: Workspace, name: str, model: Model, load: Sequence[str]) -> Path:
    """Send a load through a tap to an engine that keeps the model's time."""
    engine, tap = (f"127.0.0.1:{free_port()}" for _ in range(2))
    truth, capture = work.path(f"{name}-model.json"), work.path(f"{name}.jsonl.zst")
    capture.unlink(missing_ok=True)
    save_model(model, truth)
    serve: Command = ["sim", "serve", "--latency-model", truth, "--listen", engine]
    record: Command = ["tap", "--upstream", f"http://{engine}", "--listen", tap, "--tokenizer", "ids", "-o", capture]
    client = work.path(f"{name}-client.jsonl.zst")
    with (
        work.serving(f"{name} engine", serve, f"http://{engine}"),
        work.serving(f"{name} tap", record, f"http://{tap}"),
    ):
        work.run(f"{name} load", ["loadgen", "--url", f"http://{tap}", "-o", client, "--overwrite", *load])
    return capture


def fitted(work: Workspace, capture: Path) -> Model:
    """Fit one capture."""
    found = work.path("found.json")
    # What sim serve does not tell of itself: how many run at once, and how much of a prompt a step takes.
    work.run("fit", ["sim", "calibrate", capture, "-o", found, *SCHEDULER])
    return load_model(found)


def compare(truth: Model, found: Model) -> int:
    """Print both; 1 if a parameter was missed."""
    missed = 0
    print(f"{'parameter':<26}{'truth':>12}{'found':>12}{'off':>9}  95 % interval")
    for name, parameter in truth.parameters.items():
        got = found.parameters.get(name, Parameter(value=0.0, unit=parameter.unit))
        off = got.value / parameter.value - 1.0
        inside = got.low is not None and got.high is not None and got.low <= parameter.value <= got.high
        verdict = "" if abs(off) <= NEAR or inside else "  MISSED"
        missed += bool(verdict)
        interval = "" if got.low is None else f"{got.low:.4g} … {got.high:.4g}"
        print(f"{name:<26}{parameter.value:>12.4g}{got.value:>12.4g}{off:>+9.1%}  {interval}{verdict}")
    print(f"API server: {truth.frontend_placement}, found {found.frontend_placement}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
