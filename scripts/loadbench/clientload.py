"""Requests of the reference clients, and the log line of a request."""

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import msgspec

BODIES = 256
"""Number of different prompts, prepared before the run."""


class ClientLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a run: a client's command line, as JSON."""

    url: str
    out: str
    duration_s: float
    rate: float | None
    """Requests a second at equal gaps; null: closed loop."""
    parallel: int
    """Requests in flight in a closed loop; initial connections of an open loop."""
    prompt_tokens: int
    output_tokens: int

    def bodies(self) -> list[bytes]:
        draws, tokens = random.Random(0), self.output_tokens
        fields = {"model": "truth", "max_tokens": tokens, "min_tokens": tokens, "temperature": 0, "ignore_eos": True}
        fields |= {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        prompts = ([draws.randrange(1000, 100_000) for _ in range(self.prompt_tokens)] for _ in range(BODIES))
        return [json.dumps({"prompt": prompt, **fields}).encode() for prompt in prompts]

    def open(self) -> TextIO:
        return open(self.out, "w")

    def due_ns(self, t0_ns: int) -> Iterator[int]:
        """Return the planned time of each request of an open loop."""
        assert self.rate is not None
        return (t0_ns + round(number * 1e9 / self.rate) for number in range(int(self.rate * self.duration_s)))


def read_load() -> ClientLoad:
    return msgspec.json.decode(sys.argv[1], type=ClientLoad)


def keep(out: TextIO, request_id: str, sent_ns: int, read_ns: list[int]) -> None:
    """Write the line of a request: TTFT and time of every read (token events), from its send time."""
    since_ns = [at_ns - sent_ns for at_ns in read_ns]
    record = {"request_id": request_id, "ttft_ns": since_ns[0] if since_ns else None, "reads_ns": since_ns}
    out.write(json.dumps({**record, "e2e_ns": time.perf_counter_ns() - sent_ns}) + "\n")
