"""Requests of the reference clients, and the line that each client keeps of a request."""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

BODIES = 256
"""Different prompts, made beforehand and sent in turn: making them is not what is measured here."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The load of one run."""

    url: str
    out: Path
    duration_s: float
    rate: float | None
    """Requests a second at equal gaps; null: closed loop."""
    parallel: int
    """Requests in flight in a closed loop; connections opened before an open one."""
    bodies: tuple[bytes, ...]

    def due_ns(self, t0_ns: int) -> Iterator[int]:
        """Absolute time of each request of an open loop."""
        assert self.rate is not None
        return (t0_ns + round(number * 1e9 / self.rate) for number in range(int(self.rate * self.duration_s)))


def read_load() -> ClientLoad:
    """The load that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--duration", type=float, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--output-tokens", type=int, required=True)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--parallel", type=int, default=64)
    args = parser.parse_args()
    draws = random.Random(0)
    fields = {"model": "truth", "max_tokens": args.output_tokens, "min_tokens": args.output_tokens, "temperature": 0}
    fields |= {"ignore_eos": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    prompts = ([draws.randrange(1000, 100_000) for _ in range(args.prompt_tokens)] for _ in range(BODIES))
    bodies = tuple(json.dumps({"prompt": prompt, **fields}).encode() for prompt in prompts)
    return ClientLoad(args.url, args.out, args.duration, args.rate, args.parallel, bodies)


def keep(out: TextIO, request_id: str, sent_ns: int, read_ns: list[int]) -> None:
    """Write a request's line: times of its first token and of every read, from the time it was sent."""
    since_ns = [at_ns - sent_ns for at_ns in read_ns]
    record = {"request_id": request_id, "ttft_ns": since_ns[0] if since_ns else None, "reads_ns": since_ns}
    out.write(json.dumps({**record, "e2e_ns": time.perf_counter_ns() - sent_ns}) + "\n")
