"""Ground truth over sockets: an engine with known parameters, captured through the tap, fitted, and compared.

    scripts/truth.py [--seed K] [--number N] [--fault KIND[=VALUE][:RATE]] [--keep FOLDER]

`sim serve` keeps the built-in model's time, `tap` records what `loadgen --pattern calibration` sends it, `sim fit`
learns from the capture alone. Prints each parameter's truth beside what was found; exit status 1 if one is neither
within 5 % nor inside its interval. Needs an idle machine: other work on it is time that the engine's model does not
know.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from sim.latency.modelfile import Model, Parameter, default_model, load_model, make_model, save_model

NEAR = 0.05
HEALTHY_S = 60.0


def main() -> int:
    """Capture, fit, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the load (1)")
    parser.add_argument("--number", type=int, help="sessions (three rounds)")
    parser.add_argument("--fault", action="append", default=[], help="as sim serve has it: a misspecified engine")
    parser.add_argument("--keep", type=Path, help="folder for the capture and the model")
    parser.add_argument("--port", type=int, default=8790, help="the engine's; the tap's is the next (8790)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return compare(known_engine(), learn(args, folder))


def known_engine() -> Model:
    """Return the built-in model with prices of shared context and of rests, away from their defaults."""
    model = default_model()
    costs = {"per_kv_token_ms": 2e-4, "per_repeated_kv_token_ms": 5e-5}
    costs |= {"rested_step_ms": 2.0, "per_rested_depth_ms": 1.2e-3}
    return make_model({**{name: one.value for name, one in model.parameters.items()}, **costs}, model.engine)


def learn(args: argparse.Namespace, folder: Path) -> Model:
    """Fit one capture."""
    engine, tap = f"127.0.0.1:{args.port}", f"127.0.0.1:{args.port + 1}"
    truth, capture, found = folder / "truth.json", folder / "capture.jsonl.zst", folder / "found.json"
    capture.unlink(missing_ok=True)
    save_model(known_engine(), truth)
    faults = [word for fault in args.fault for word in ("--fault", fault)]
    load = ["--pattern", "calibration", "--seed", args.seed, *(["--number", args.number] if args.number else [])]
    with (
        serving(["sim", "serve", "--latency-model", truth, "--listen", engine, *faults], engine),
        serving(["tap", "--upstream", f"http://{engine}", "--listen", tap, "--tokenizer", "ids", "-o", capture], tap),
    ):
        client = folder / "client.jsonl.zst"
        subprocess.run(module(["loadgen", "--url", f"http://{tap}", "-o", client, "--overwrite", *load]), check=True)
    # What sim serve does not tell of itself: how many run at once, and how much of a prompt a step takes.
    config = default_model().engine
    settings = ["--max-num-seqs", config.max_num_seqs, "--max-num-batched-tokens", config.max_num_batched_tokens]
    subprocess.run(module(["sim", "fit", capture, "-o", found, *settings]), check=True)
    return load_model(found)


def module(command: Sequence[object]) -> list[str]:
    """A command of ours as this Python runs it."""
    return [sys.executable, "-m", *(str(word) for word in command)]


@contextmanager
def serving(command: Sequence[object], listen: str) -> Iterator[None]:
    """The server while it is up; it drains at the end."""
    with subprocess.Popen(module(command), stdout=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + HEALTHY_S
            while not answers(f"http://{listen}/health"):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{' '.join(map(str, command))}: does not serve")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait()


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False


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
