"""What a run amounts to so far: counts and samples, enough for a live line and a summary, no records."""

from array import array
from collections import Counter, deque
from collections.abc import Iterable

from tracefile import Record

RECENT = 512
"""How many of the latest TTFTs the live line looks at."""

REFUSED = frozenset({400, 401, 403, 404, 405, 413, 415, 422})
"""What an engine answers to a request it will never take."""


class Tally:
    """Grows with each request; times in ms."""

    def __init__(self) -> None:
        self.started = 0
        self.in_flight = 0
        self.statuses: Counter[str] = Counter()
        self.refused = 0
        self.errors: Counter[str] = Counter()
        """By kind."""
        self.held = 0
        """How many waited for a slot of ``--parallel``; their lag is no lateness of ours."""
        self.ttft_ms = array("d")
        self.ttft_from_schedule_ms = array("d")
        self.itl_ms = array("d")
        """Gap over tokens of each later read."""
        self.e2e_ms = array("d")
        """Of requests that ended well."""
        self.lag_ms = array("d")
        self.recent_ttft_ms: deque[float] = deque(maxlen=RECENT)
        self.prompt_tokens = 0
        """Of requests whose cached tokens were reported."""
        self.cached_tokens = 0
        self.cached_reported = 0
        self.output_tokens = 0
        self.without_output_hashes = 0
        """Requests that ended well but whose generated ids nobody told."""
        self.exact_output = 0
        """Requests that ended well with as many output tokens as they asked for."""

    def start(self) -> None:
        """A request goes out."""
        self.started += 1
        self.in_flight += 1

    @property
    def ended(self) -> int:
        """Requests that are over, however they ended."""
        return self.statuses.total()

    @property
    def failed(self) -> int:
        """Requests that did not end well."""
        return self.ended - self.statuses["ok"]

    def finish(self, record: Record, *, held: bool) -> None:
        """A request is over and described."""
        self.statuses[record.status] += 1
        if record.error is not None:
            self.errors[record.error] += 1
        self.refused += record.http_status in REFUSED
        self._add_lag(record, held)
        self._add_latency(record)
        self._add_tokens(record)

    def only_refusals(self, count: int) -> bool:
        """Whether ``count`` requests or more are over, every one refused as malformed."""
        return self.refused == self.ended >= count

    def _add_lag(self, record: Record, held: bool) -> None:
        if record.arrival_ms is None or record.scheduled_ms is None:
            return
        self.held += held
        if not held:
            self.lag_ms.append(record.arrival_ms - record.scheduled_ms)

    def _add_latency(self, record: Record) -> None:
        if record.ttft_ms is not None and record.arrival_ms is not None:
            self.ttft_ms.append(record.ttft_ms)
            self.recent_ttft_ms.append(record.ttft_ms)
            if record.scheduled_ms is not None:
                self.ttft_from_schedule_ms.append(record.arrival_ms + record.ttft_ms - record.scheduled_ms)
        self.itl_ms.extend(gaps_per_token(record))
        if record.status == "ok" and record.e2e_ms is not None:
            self.e2e_ms.append(record.e2e_ms)

    def _add_tokens(self, record: Record) -> None:
        self.output_tokens += record.output_tokens or 0
        if record.status == "ok":
            self.without_output_hashes += record.output_block_hashes is None
            self.exact_output += record.output_tokens == record.max_tokens
        if record.cached_tokens is not None and record.prompt_tokens is not None:
            self.cached_reported += 1
            self.cached_tokens += record.cached_tokens
            self.prompt_tokens += record.prompt_tokens


def gaps_per_token(record: Record) -> Iterable[float]:
    """Inter-token latencies in ms: each read's gap over its tokens."""
    return (gap / tokens for gap, tokens in zip(record.itl_ms, record.itl_tokens, strict=True) if tokens)
