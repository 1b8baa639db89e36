"""Server-sent events, cut anywhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.completion import EventStream

STREAM = (
    b': hello\n\ndata: {"a":1}\n\nevent: x\ndata: one\ndata:two\nid: 3\n\n: keep-alive\n\n'
    b"data\n\ndata: [DONE]\n\ndata: cut"
)
EVENTS = [b'{"a":1}', b"one\ntwo", b"", b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    stream = EventStream()
    return [event for piece in pieces for event in stream.feed(piece)]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_events_are_the_same_cut_at_every_byte(ending: bytes) -> None:
    stream = STREAM.replace(b"\n", ending)
    assert read([stream]) == EVENTS
    for cut in range(len(stream) + 1):
        assert read([stream[:cut], stream[cut:]]) == EVENTS, cut


def test_event_is_returned_by_the_read_that_completes_it() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\r\n\r") == [b"a"]  # the CR ends the line, whether or not an LF follows
    assert stream.feed(b"\n") == []
    assert stream.feed(b"data: b\n\ndata: c\n") == [b"b"]
    assert stream.feed(b"\n") == [b"c"]


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        # A read that resembles one complete event, but is not.
        ([b"data: a\n\n", b"data: b\r\n\n", b"data: c\n\n"], [b"a", b"b", b"c"]),
        ([b"data: a\n\n", b"data: b\rdata: c\n\n"], [b"a", b"b\nc"]),
        ([b"data: a\n\n", b"data: b\n", b"data: c\n\n", b"data: d\n\n"], [b"a", b"b\nc", b"d"]),
        ([b"data: a\r\n\r", b"\n", b"data: b\n\n"], [b"a", b"b"]),
        # A CR LF cut in two, then an LF of its own, which ends the event: only the CR's LF is swallowed.
        ([b"data: a\r", b"\n", b"\ndata: b\n\n"], [b"a", b"b"]),
    ],
)
def test_fast_path_equals_general_parser(pieces: list[bytes], events: list[bytes]) -> None:
    assert read(pieces) == events


def test_event_of_many_reads_is_scanned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the bytes that each read makes the stream look at: quadratic work would be 8,000 times these."""
    looked_at = 0

    class Counting(bytearray):
        def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
            nonlocal looked_at
            looked_at += len(self) - start
            return super().find(sub, start)

    stream = EventStream()
    monkeypatch.setattr(stream, "_pending", Counting())
    event = b"data: " + b"x" * 16_000_000
    pieces = [event[at : at + 2_000] for at in range(0, len(event), 2_000)] + [b"\n", b"\n"]
    events = [actual for piece in pieces for actual in stream.feed(piece)]
    assert [len(actual) for actual in events] == [16_000_000]
    assert looked_at < 2 * len(event)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@given(
    texts=st.lists(st.sampled_from([b"data: a", b"data:b", b": c", b"", b"event: x", b"data"])), size=st.integers(1, 9)
)
def test_events_do_not_depend_on_reads(ending: bytes, texts: list[bytes], size: int) -> None:
    stream = ending.join(texts) + ending * 2
    assert read([stream[at : at + size] for at in range(0, len(stream), size)]) == read([stream])
