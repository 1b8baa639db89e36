"""Sending capacity of a machine, measured by ``loadgen selftest`` and kept for later runs.

Three saturating loads (short outputs, long outputs, long prompts) give the cost of a request, an event and a prompt
token. At these costs, a later run's rates are its share of the capacity.
"""

import hashlib
import os
import platform
from pathlib import Path

import msgspec

from tracefile.commandline.parser import VERSION
from tracefile.commandline.workers import usable_cores

SHORT_OUTPUT, LONG_OUTPUT = 16, 256
SHORT_PROMPT, LONG_PROMPT = 256, 8192


class RateTruth(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of the client's times at one rate, in ms; null: not measured."""

    rate: float
    requests: int
    ttft_error_p50_ms: float | None
    ttft_error_p99_ms: float | None
    """Told TTFT − the server's TTFT."""
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    """Send − schedule."""
    client_cpu: float
    """In cores."""


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Sending capacity of one machine with ``procs`` senders."""

    machine: str
    measured: str
    """Day, ISO 8601."""
    procs: int
    requests_per_s: float
    """Streams of 16 tokens, prompts of 256."""
    events_per_s: float
    """Tokens of streams of 256, prompts of 256."""
    prompt_tokens_per_s: float
    """Prompts of 8,192 tokens, streams of 16."""
    requests_per_core_s: float
    """Of 16-token streams, a second of CPU time of the client's processes."""
    events_per_core_s: float
    """Of 256-token streams, likewise."""
    at_rates: list[RateTruth]

    @property
    def seconds_per_request(self) -> float:
        prompt, response = SHORT_PROMPT * self.seconds_per_prompt_token, SHORT_OUTPUT * self.seconds_per_event
        return max(0.0, 1 / self.requests_per_s - prompt - response)

    @property
    def seconds_per_event(self) -> float:
        longer = LONG_OUTPUT / self.events_per_s - 1 / self.requests_per_s
        return max(0.0, longer / (LONG_OUTPUT - SHORT_OUTPUT))

    @property
    def seconds_per_prompt_token(self) -> float:
        longer = LONG_PROMPT / self.prompt_tokens_per_s - 1 / self.requests_per_s
        return max(0.0, longer / (LONG_PROMPT - SHORT_PROMPT))

    def share(self, requests: int, events: int, prompt_tokens: int, seconds: float) -> float:
        cost_s = requests * self.seconds_per_request + events * self.seconds_per_event
        return (cost_s + prompt_tokens * self.seconds_per_prompt_token) / seconds if seconds else 0.0


def machine() -> str:
    python = f"Python {platform.python_version()}"
    return f"{platform.node()}, {_processor()}, {usable_cores()} cores, {python}, kvtape {VERSION}"


def capacity_file(procs: int) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.blake2b(f"{machine()}, {procs}".encode(), digest_size=8).hexdigest()
    return cache / "kvtape" / "calibration" / f"{name}.json"


def load_capacity(procs: int = 1) -> Capacity | None:
    """Return this machine's capacity; null: not measured, or not readable."""
    try:
        return msgspec.json.decode(capacity_file(procs).read_bytes(), type=Capacity)
    except (OSError, msgspec.DecodeError):
        return None


def save_capacity(capacity: Capacity) -> Path:
    path = capacity_file(capacity.procs)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(capacity), indent=2) + b"\n")
    fresh.replace(path)
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
