"""Routing of live traffic: what a policy gets to see of a request before anybody parses it, and its failures."""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import xxhash

from engines.routing.load import least_loaded
from engines.routing.policies import Learner
from engines.routing.records import TOKENS_ALONE, Policy, RoutedEngine, RoutedRequest, RoutingCosts
from engines.routing.routes import Route, parse_route
from tracefile.records.errors import InputError, failure_words
from wire.head import RequestHead

ROUTE_BYTES = 16 << 10
"""Start of a request's body that a policy sees, as hashes."""
PIECE_BYTES = 512
BYTES_PER_TOKEN = 4
"""Estimate for prompts whose tokens are not known yet."""
PIECE_TOKENS = PIECE_BYTES / BYTES_PER_TOKEN
MAX_PROMPT_TOKENS = 1 << 20
"""Most that a request counts for: a length is the client's word, and the counts are shared by all."""
_PROMPT = re.compile(rb'"(?:messages|prompt|input|system)"\s*:')
"""Members of a body that begin a prompt: settings before them differ between requests that share a prefix."""
_MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')
MODEL_WITHIN_BYTES = 1024
SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id")
"""Headers with the client's conversation id; the first one present counts."""


def prompt_start(reads: Sequence[bytes], most_bytes: int = ROUTE_BYTES) -> list[int]:
    """Return a key for each whole piece of the prompt in the first bytes of a body.

    A key depends on the model and on all of the prompt before it. The last one may hold members behind the prompt.
    """
    data = b"".join(_first_reads(reads, most_bytes))[:most_bytes]
    prompt = _PROMPT.search(data)
    model = _MODEL.search(data, 0, MODEL_WITHIN_BYTES)
    key = 0 if model is None else xxhash.xxh3_64_intdigest(model[1])
    keys = []
    for at in range(0 if prompt is None else prompt.start(), len(data) - PIECE_BYTES + 1, PIECE_BYTES):
        key = xxhash.xxh3_64_intdigest(data[at : at + PIECE_BYTES], key)
        keys.append(key)
    return keys


def _first_reads(reads: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the reads that the first bytes are in: a large body is not joined for its start."""
    for read in reads:
        yield read
        most_bytes -= len(read)
        if most_bytes <= 0:
            return


def awaited_bytes(head: RequestHead) -> int:
    """Return the bytes of a body to wait for; 0 where none comes, or only after the upstream's word."""
    if b"expect" in head.names:
        return 0
    length = first_value(head, b"content-length")
    if length:
        return min(int(length), ROUTE_BYTES)
    return ROUTE_BYTES if b"transfer-encoding" in head.names else 0


def session_of(head: RequestHead) -> bytes | None:
    for name in SESSION_HEADERS:
        if value := first_value(head, name):
            return value
    return None


def first_value(head: RequestHead, name: bytes) -> bytes:
    """Return a header's first value; empty: not there."""
    return head.headers[head.names.index(name)][1] if name in head.names else b""


def prompt_tokens(head: RequestHead) -> int:
    """Return an estimate from the body's length, bounded; 0: unknown."""
    length = first_value(head, b"content-length")
    return min(int(length) // BYTES_PER_TOKEN, MAX_PROMPT_TOKENS) if length.isdigit() else 0


class LivePolicy:
    """A policy, with what it needs to see, and the count of its failures: they cost no request."""

    def __init__(
        self,
        policy: Policy,
        *,
        reads_prompt: bool,
        keeps_sessions: bool,
        sees_load: bool = True,
        costs: RoutingCosts = TOKENS_ALONE,
    ) -> None:
        self._policy, self.costs = policy, costs
        self.reads_prompt, self.keeps_sessions, self.sees_load = reads_prompt, keeps_sessions, sees_load
        self.failures: Counter[str] = Counter()
        """Requests that went to the least loaded instead, by the type of the exception."""
        self.learner = policy if isinstance(policy, Learner) else None

    def choose(self, request: RoutedRequest, engines: list[RoutedEngine]) -> int:
        """Return the index of the engine; where the policy raises, that of the least loaded."""
        try:
            return self._policy(request, engines)
        except Exception as error:
            name = type(error).__name__
            if not self.failures[name]:  # no text of the exception: it may quote a request
                print(f"tap: --route: {failure_words(error)}; least-loaded routes instead", file=sys.stderr, flush=True)
            self.failures[name] += 1
            return least_loaded(request, engines)


def live_route(text: str) -> Route:
    """Read ``--route``. Raises InputError for what is no route, and for settings of simulated routers alone."""
    route = parse_route(text)
    if route.knowledge == "complete" or route.lag_s or route.index_blocks:
        raise InputError(
            f"--route {text}: complete knowledge, lag and index-blocks are for simulated engines; expected none of them"
        )
    return route


def live_policy(text: str) -> LivePolicy:
    route = live_route(text)
    name = text.split(":", maxsplit=1)[0]
    return LivePolicy(
        route.kind.make(),
        reads_prompt=route.kind.uses_cache and route.knowledge != "none",
        keeps_sessions=name not in ("round-robin", "least-loaded"),
        sees_load=name not in ("round-robin", "session"),
        costs=route.costs or TOKENS_ALONE,
    )
