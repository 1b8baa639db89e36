"""Weka's agentic traces (kv-cache-tester): a JSON object a conversation, alone in a file or one a line.

Source: callanjfox/kv-cache-tester, and the AgentX traces made from it; fields as aiperf 0.13 and guidellm 0.8 read
them. ``t`` is in seconds from the conversation's start, so conversations have no common clock: each begins at t = 0.
Block ids are local to a conversation. A ``subagent`` is a session of its own, whose ``t`` counts from its start or, as
in AgentX, from the conversation's: where the first is earlier than the subagent itself, from its start.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import xxhash

from tracefile.importers.blocktraces import BlockId, chained, split_ids
from tracefile.records.decoding import convert_row, decode_row
from tracefile.records.errors import InputError
from tracefile.records.schema import Count, HashInfo, Meta, Ordinal, Record, RequestId, Seconds, SessionId

FINISH_REASONS = {"tool_use": "tool_calls", "end_turn": "stop"}
WEKA_KEYS = frozenset({"id", "block_size", "requests"})
EXPECTED = "a Weka trace: id, block_size and requests"


class WekaRequest(msgspec.Struct, kw_only=True):
    """Call of a model; times in seconds."""

    t: Seconds
    type: Literal["n", "s"]
    model: str | None = None
    input_length: Count = msgspec.field(name="in")
    output_length: Count = msgspec.field(name="out")
    hash_ids: list[BlockId] = []
    stop: str | None = None
    api_time: Seconds | None = None
    think_time: Seconds | None = None
    ttft: Seconds | None = None


class WekaSubagent(msgspec.Struct, kw_only=True):
    """Agent that a conversation started."""

    t: Seconds
    agent_id: str
    requests: list[WekaRequest]


class WekaTrace(msgspec.Struct, kw_only=True):
    """Conversation."""

    id: str
    block_size: Ordinal
    requests: list[dict[str, Any]]


class WekaDecoder:
    """Conversations as records, under the conversation's id and a number."""

    def __init__(self, found: dict[str, Any]) -> None:
        size = found["block_size"]
        known = isinstance(size, int) and size > 0
        self.meta = Meta(block_size=size if known else None, hash=HashInfo(algorithm="weka"))
        self._conversations: set[str] = set()
        self._decoder = msgspec.json.Decoder(WekaTrace)

    @property
    def warnings(self) -> Sequence[str]:
        count = len(self._conversations)
        return [f"{count} conversations, each on a clock of its own: all begin at t = 0"] if count > 1 else []

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        trace = decode_row(self._decoder.decode, line, where, EXPECTED)
        if trace.id in self._conversations:
            raise InputError(f"{where}: id: {trace.id} again; expected unique ids")
        if trace.block_size != self.meta.block_size:
            raise InputError(
                f"{where}: block_size: {trace.block_size}; expected {self.meta.block_size}, as in the first one"
            )
        self._conversations.add(trace.id)
        return list(self._conversation(trace, where))

    def _conversation(self, trace: WekaTrace, where: str) -> Iterator[Record]:
        own: list[WekaRequest] = []
        agents: list[WekaSubagent] = []
        for number, found in enumerate(trace.requests, start=1):
            place = f"{where}: requests: item {number}"
            if found.get("type") == "subagent":
                agents.append(convert_row(found, WekaSubagent, place, EXPECTED))
            else:
                own.append(convert_row(found, WekaRequest, place, EXPECTED))
        yield from self._session(trace.id, trace.id, own, 0.0, where)
        for agent in agents:
            relative = bool(agent.requests) and agent.requests[0].t < agent.t
            zero_s = agent.t if relative else 0.0
            yield from self._session(trace.id, f"{trace.id}::{agent.agent_id}", agent.requests, zero_s, where)

    def _session(
        self, conversation: str, name: str, requests: Sequence[WekaRequest], zero_s: float, where: str
    ) -> Iterator[Record]:
        before: Record | None = None
        assert self.meta.block_size is not None
        for turn, request in enumerate(requests, start=1):
            ids, _ = split_ids(request.hash_ids, request.input_length, self.meta.block_size, where)
            record = Record(
                request_id=RequestId(f"{name}-{turn}"),
                session_id=SessionId(name),
                session_source="explicit",
                parent_id=None if before is None else before.request_id,
                turn=turn,
                arrival_ms=(zero_s + request.t) * 1000,
                ttft_ms=None if request.ttft is None else request.ttft * 1000,
                e2e_ms=None if request.api_time is None else request.api_time * 1000,
                think_ms=_think_ms(request, before, zero_s),
                finish_reason=FINISH_REASONS.get(request.stop or "", request.stop or None),
                model=request.model,
                stream=request.type == "s",
                prompt_tokens=request.input_length,
                output_tokens=request.output_length,
                tokens_source="usage",
                block_hashes=list(chained(ids, xxhash.xxh3_64_intdigest(conversation.encode()))),
            )
            yield record
            before = record


def _think_ms(request: WekaRequest, before: Record | None, zero_s: float) -> float | None:
    """Pause before a request: as told, else from the end before, if that is known."""
    if before is None:
        return None
    if request.think_time is not None:
        return request.think_time * 1000
    end_ms = before.end_ms()
    return None if end_ms is None else max(0.0, (zero_s + request.t) * 1000 - end_ms)
