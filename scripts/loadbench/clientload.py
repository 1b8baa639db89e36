"""Requests of the reference clients, and the line that each client keeps of a request."""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
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
    output_tokens: int
    rate: float | None
    """Requests a second at equal gaps; null: closed loop."""
    parallel: int
    """Requests in flight in a closed loop."""
    bodies: tuple[bytes, ...]

    def due_ns(self, t0_ns: int) -> Iterator[tuple[int, int]]:
        """Number and absolute time of each request of an open loop."""
        assert self.rate is not None
        for number in range(int(self.rate * self.duration_s)):
            yield number, t0_ns + round(number * 1e9 / self.rate)

    def body(self, number: int) -> bytes:
        """The body of a request."""
        return self.bodies[number % len(self.bodies)]


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
    bodies = tuple(_body(draws, args.prompt_tokens, args.output_tokens) for _ in range(BODIES))
    return ClientLoad(args.url, args.out, args.duration, args.output_tokens, args.rate, args.parallel, bodies)


def _body(draws: random.Random, prompt_tokens: int, output_tokens: int) -> bytes:
    fields = {
        "prompt": [draws.randrange(1000, 100_000) for _ in range(prompt_tokens)],
        "model": "truth",
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


def keep(out: TextIO, request_id: str, sent_ns: int, read_ns: list[int], tokens: list[int]) -> None:
    """Write a request's line: time of its first token, gap and tokens of each later read."""
    gaps_ms = [(later - earlier) / 1e6 for earlier, later in pairwise(read_ns)]
    record = {
        "request_id": request_id,
        "arrival_ns": sent_ns,
        "ttft_ns": read_ns[0] - sent_ns if read_ns else None,
        "itl_ms": gaps_ms,
        "itl_tokens": tokens[1:],
        "output_tokens": sum(tokens),
        "e2e_ns": time.perf_counter_ns() - sent_ns,
    }
    out.write(json.dumps(record) + "\n")
