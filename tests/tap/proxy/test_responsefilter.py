"""Filtered responses equal the responses without injection, byte for byte."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.dialect import DialectName
from tap.ipc.settings import Injection
from tap.proxy.responsefilter import EventSplitter, ResponseFilter
from tests.tap.proxy import vllm_rendering as vllm

# Texts that look like what is looked for: names, events, escapes.
awkward = st.sampled_from(
    [
        '"token_ids":[1]',
        ',"token_ids":[1,2]',
        '{"usage":null}',
        "data: x\n\n",
        "\r\n\r",
        "token_ids",
        "\\",
        '"',
        "é☃😀",
        "",
    ]
)
texts = st.lists(awkward | st.text(max_size=6), max_size=3).map("".join)
token_ids = st.lists(st.integers(0, 129279), min_size=1, max_size=3)
logprobs = st.none() | st.just({"content": [{"token": '"token_ids":[7]', "logprob": -0.5, "bytes": [34]}]})
chat_deltas = st.one_of(
    st.none(),
    texts.map(lambda text: {"content": text}),
    texts.map(lambda text: {"reasoning": text}),
    texts.map(lambda text: {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}),
)
text_deltas = texts.map(lambda text: {"text": text})


@st.composite
def answers(draw: st.DrawFn) -> Any:
    chat, n = draw(st.booleans()), draw(st.integers(1, 3))
    steps = []
    for index in range(n):
        deltas = draw(st.lists(chat_deltas if chat else text_deltas, max_size=4))
        steps += [vllm.Step(index, draw(token_ids), delta, None, draw(logprobs)) for delta in deltas]
        last = draw(st.none() | texts.map(lambda text: {"content" if chat else "text": text}))
        steps.append(vllm.Step(index, draw(token_ids), last, draw(st.sampled_from(["stop", "length", "tool_calls"]))))
    return vllm.Answer(
        chat=chat,
        prompt_token_ids=draw(st.lists(st.integers(0, 129279), max_size=40)),
        steps=draw(st.permutations(steps)) if draw(st.booleans()) else steps,
        n=n,
        cached_tokens=draw(st.none() | st.integers(0, 32)),
        continuous_usage=draw(st.booleans()),
        comments=draw(st.lists(st.sampled_from(["keep-alive", 'token_ids":[1]', '"usage"']), max_size=2)),
    )


injections: st.SearchStrategy[frozenset[Injection]] = st.sampled_from(
    [frozenset({"usage"}), frozenset({"token-ids"}), frozenset({"usage", "token-ids"})]
)


def filtered(reads: list[bytes], injected: frozenset[Injection], dialect: DialectName = "vllm") -> bytes:
    response = ResponseFilter(injected, dialect)
    return b"".join([*map(response.feed, reads), response.finish()])


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({min(position, len(stream)) for position in at} | {len(stream)})
    return [stream[a:b] for a, b in itertools.pairwise([0, *ends])]


@given(
    answer=answers(),
    injected=injections,
    at=st.lists(st.integers(0, 4000), max_size=12),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_filtered_stream_equals_stream_without_injection(
    answer: Any, injected: frozenset[Injection], at: list[int], line_end: bytes
) -> None:
    requested = vllm.stream_events(answer, usage="usage" in injected, ids="token-ids" in injected)
    plain = vllm.stream_events(answer, usage=False, ids=False)
    reads = cut(b"".join(requested).replace(b"\n", line_end), at)
    assert filtered(reads, injected) == b"".join(plain).replace(b"\n", line_end)


@given(answer=answers(), requests_ids=st.booleans(), at=st.lists(st.integers(0, 4000), max_size=12))
def test_client_requested_fields_stay(answer: Any, requests_ids: bool, at: list[int]) -> None:
    """One of the two is the client's own, the other was added."""
    injected: frozenset[Injection] = frozenset({"usage"} if requests_ids else {"token-ids"})
    requested = vllm.stream_events(answer, usage=True, ids=True)
    plain = vllm.stream_events(answer, usage=not requests_ids, ids=requests_ids)
    assert filtered(cut(b"".join(requested), at), injected) == b"".join(plain)


CHAT = vllm.Answer(
    chat=True,
    prompt_token_ids=[1, 22, 333],
    steps=[
        vllm.Step(0, [5], {"content": "a\n"}),
        vllm.Step(1, [6], None),
        vllm.Step(0, [7, 8], {"content": "☃"}, "stop"),
        vllm.Step(1, [9], {"content": "b"}, "length"),
    ],
    n=2,
    comments=["keep-alive"],
)
BOTH: frozenset[Injection] = frozenset({"usage", "token-ids"})


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_filter_does_not_depend_on_reads(line_end: bytes) -> None:
    requested = b"".join(vllm.stream_events(CHAT, usage=True, ids=True)).replace(b"\n", line_end)
    plain = b"".join(vllm.stream_events(CHAT, usage=False, ids=False)).replace(b"\n", line_end)
    assert plain != requested
    for at in range(len(requested) + 1):
        assert filtered([requested[:at], requested[at:]], BOTH) == plain
    assert filtered([requested[at : at + 1] for at in range(len(requested))], BOTH) == plain


def test_each_event_is_written_with_the_read_that_completes_it() -> None:
    response = ResponseFilter(BOTH, "vllm")
    requested = vllm.stream_events(CHAT, usage=True, ids=True)
    plain = vllm.stream_events(CHAT, usage=False, ids=False)
    left = [out for event in requested if (out := response.feed(event))]
    assert left == plain
    assert response.finish() == b""


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error":{"message":"token_ids\\":[1] \\"usage\\""}}\n\n',
        b'data: {"choices":"token_ids","token_ids":[1],"usage":{}}\n\n',
        b'event: x\ndata: {"token_ids":[1],\ndata: "usage":1}\n\n',  # data of two lines: no engine writes that
    ],
)
def test_unexpected_data_passes_unchanged(event: bytes) -> None:
    assert filtered([event], BOTH) == event


def test_older_vllm_has_null_usage() -> None:
    requested = b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\ndata: {"choices":[],"usage":{"a":1}}\n\n'
    assert filtered([requested], BOTH) == b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'


def test_system_fingerprint_position() -> None:
    """It stands in the last event: with usage asked for that is the usage event, and it goes with it."""
    answer = vllm.Answer(True, [1], [vllm.Step(0, [2], {"content": "x"}, "stop")], fingerprint="vllm-0.32.0-abcdef12")
    requested = b"".join(vllm.stream_events(answer, usage=True, ids=True))
    plain = b"".join(vllm.stream_events(answer, usage=False, ids=False))
    moved = b',"system_fingerprint":"vllm-0.32.0-abcdef12"'
    assert filtered([requested], BOTH) == plain.replace(moved, b"")
    ids_only = b"".join(vllm.stream_events(answer, usage=False, ids=True))
    assert filtered([ids_only], frozenset({"token-ids"})) == plain


def test_endless_event_passes_unfiltered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tap.proxy.responsefilter.MAX_EVENT_BYTES", 100)
    response = ResponseFilter(BOTH, "vllm")
    assert response.feed(b"data: " + b"x" * 60) == b""
    assert response.feed(b"y" * 60) == b"data: " + b"x" * 60 + b"y" * 60
    assert response.feed(b"z") == b"z"


@given(
    stream=st.lists(st.sampled_from([b"a", b"\r\n", b"\n", b"data:", b": "]), max_size=30).map(b"".join),
    at=st.lists(st.integers(0, 60), max_size=10),
)
def test_splitter_events_do_not_depend_on_reads(stream: bytes, at: list[int]) -> None:
    cutter, at_once = EventSplitter(), EventSplitter()
    pieces = [event for read in cut(stream, at) for event in cutter.feed(read)]
    complete = at_once.feed(stream)
    assert b"".join(complete) + at_once.flush() == stream
    assert b"".join(pieces) + cutter.flush() == stream
    assert pieces == complete


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"usage":{},"choices":[' + b"{}," * 1_000_000 + b"{}]}\n\n",
        b'data: {"usage":null}\n' + b"data: x\n" * 500_000 + b"\n",
    ],
)
def test_huge_event_passes_unchanged(event: bytes) -> None:
    filtering = ResponseFilter(frozenset({"usage", "token-ids"}), "vllm")
    reads = [event[at : at + 65536] for at in range(0, len(event), 65536)]
    assert b"".join(filtering.feed(read) for read in reads) == event
