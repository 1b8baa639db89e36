"""The clients that are measured: how each is started for a case, and how its own word on each request is read."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.loadbench.cases import Case
from tracefile import keyed_id, load_key, load_trace

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Subject:
    """Client under measurement."""

    name: str
    command: Callable[[Case, str, Path], list[str]]
    """The command line for a case, a server's URL and a folder to write to."""
    ttft_ns: Callable[[Path, Iterable[str]], dict[str, float]]
    """What it says the first token took, by the request ids that the server saw, out of its folder."""
    environment: Mapping[str, str] = field(default_factory=dict)


def kvtape() -> Subject:
    """``loadgen`` with full recording: hashes, records, trace."""
    return Subject("kvtape", _kvtape, _trace_ttfts)


def reference(name: str, module: str) -> Subject:
    """A client that stands beside this file."""

    def command(case: Case, url: str, folder: Path) -> list[str]:
        out = str(folder / "requests.jsonl")
        flags = ["--url", url, "--out", out, "--duration", f"{case.duration_s:g}", "--prompt-tokens"]
        flags += [str(case.prompt_tokens), "--output-tokens", str(case.output_tokens)]
        flags += ["--parallel", str(case.parallel)] if case.rate is None else ["--rate", f"{case.rate:g}"]
        return [sys.executable, "-m", f"scripts.loadbench.{module}", *flags]

    return Subject(name, command, _reference_ttfts, {"PYTHONPATH": str(ROOT)})


def _kvtape(case: Case, url: str, folder: Path) -> list[str]:
    when = ["--parallel", str(case.parallel)]
    if case.rate is not None:
        when = ["--pattern", "constant", "--rate", f"{case.rate:g}"]
    return [
        *(sys.executable, "-m", "loadgen", "--url", url, "-o", str(folder / "trace.jsonl"), "--model", "truth"),
        *("--duration", f"{case.duration_s:g}s", *when, "--json"),
        *("--prompt-tokens", str(case.prompt_tokens), "--output-tokens", str(case.output_tokens)),
    ]


def _trace_ttfts(folder: Path, request_ids: Iterable[str]) -> dict[str, float]:
    """A trace has ids keyed; the key is the one that loadgen used."""
    if not (folder / "trace.jsonl").exists():
        return {}
    key = load_key()
    _, records = load_trace(folder / "trace.jsonl")
    ttfts = {str(record.request_id): record.ttft_ms for record in records}
    found = ((name, ttfts.get(keyed_id(key, "request", name))) for name in request_ids)
    return {name: ttft_ms * 1e6 for name, ttft_ms in found if ttft_ms is not None}


def _reference_ttfts(folder: Path, request_ids: Iterable[str]) -> dict[str, float]:
    if not (folder / "requests.jsonl").exists():
        return {}
    lines = (json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines())
    return {line["request_id"]: line["ttft_ns"] for line in lines if line["ttft_ns"] is not None}
