"""Routing of live traffic: prefix block keys, session and prompt length of a request that is not parsed yet."""

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

PREFIX_BYTES = 16 << 10
"""Length of the body prefix that is hashed into prefix blocks for the policy."""
BLOCK_BYTES = 512
BYTES_PER_TOKEN = 4
"""Estimate for prompts that are not tokenized yet."""
BLOCK_TOKENS = BLOCK_BYTES / BYTES_PER_TOKEN
MAX_PROMPT_TOKENS = 1 << 20
"""Upper bound of a request's estimated prompt tokens: Content-Length is unverified, and the load is shared."""
_PROMPT = re.compile(rb'"(?:messages|prompt|input|system)"\s*:')
"""JSON keys where the prompt starts. Members before the prompt differ between requests that share a prefix."""
_MODEL = re.compile(rb'"model"\s*:\s*"([^"]*)"')
MODEL_SEARCH_BYTES = 1024
SESSION_HEADERS = (b"x-session-id", b"x-dynamo-session-id")
"""Headers with the client's session id, in order of precedence."""


def prefix_block_keys(reads: Sequence[bytes], max_bytes: int = PREFIX_BYTES) -> list[int]:
    """Return the chained key of each full prefix block of the prompt in the first ``max_bytes`` of a body.

    A key depends on the model and all previous blocks, as vLLM's block hashes; the last may include later members.
    """
    data = b"".join(_first_reads(reads, max_bytes))[:max_bytes]
    prompt = _PROMPT.search(data)
    model = _MODEL.search(data, 0, MODEL_SEARCH_BYTES)
    key = 0 if model is None else xxhash.xxh3_64_intdigest(model[1])
    keys = []
    for at in range(0 if prompt is None else prompt.start(), len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        key = xxhash.xxh3_64_intdigest(data[at : at + BLOCK_BYTES], key)
        keys.append(key)
    return keys


def _first_reads(reads: Sequence[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the reads that cover the first ``max_bytes``, so that a large body is not joined for its prefix."""
    for read in reads:
        yield read
        max_bytes -= len(read)
        if max_bytes <= 0:
            return


def prefix_wait_bytes(head: RequestHead) -> int:
    """Return the body bytes that routing waits for; 0: no body, or a body that waits for ``100 Continue``."""
    if b"expect" in head.names:
        return 0
    length = header_value(head, b"content-length")
    if length:
        return min(int(length), PREFIX_BYTES)
    return PREFIX_BYTES if b"transfer-encoding" in head.names else 0


def session_id_of(head: RequestHead) -> bytes | None:
    for name in SESSION_HEADERS:
        if value := header_value(head, name):
            return value
    return None


def header_value(head: RequestHead, name: bytes) -> bytes:
    return head.headers[head.names.index(name)][1] if name in head.names else b""


def prompt_tokens(head: RequestHead) -> int:
    """Return the prompt tokens, estimated from Content-Length and bounded; 0: unknown."""
    length = header_value(head, b"content-length")
    return min(int(length) // BYTES_PER_TOKEN, MAX_PROMPT_TOKENS) if length.isdigit() else 0


class LivePolicy:
    """A routing policy, the inputs it needs, and its failures. A failed decision falls back to least-loaded."""

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
        """Requests routed to the least loaded engine instead, by exception type."""
        self.learner = policy if isinstance(policy, Learner) else None

    def choose(self, request: RoutedRequest, engines: list[RoutedEngine]) -> int:
        """Return the index of the chosen engine; if the policy raises, the index of the least loaded engine."""
        try:
            return self._policy(request, engines)
        except Exception as error:
            name = type(error).__name__
            if not self.failures[name]:  # without the exception's text, which may quote a prompt
                print(f"tap: --route: {failure_words(error)}; least-loaded routes instead", file=sys.stderr, flush=True)
            self.failures[name] += 1
            return least_loaded(request, engines)


def live_route(text: str) -> Route:
    """Parse ``--route``. Raises InputError for an invalid route and for settings of simulated routers."""
    route = parse_route(text)
    if route.knowledge == "complete" or route.lag_s or route.index_blocks:
        raise InputError(
            f"--route {text}: knowledge=complete, lag and index-blocks need simulated engines; expected none of them"
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
