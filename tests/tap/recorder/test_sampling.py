"""Sampling: every session whole or not at all, the same at every tap, and about the share that was asked for."""

from collections import defaultdict
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tap.recorder.recorder import SessionSample
from tracefile import BlockHash, HashKey, Record, RequestId, SessionId, SessionIndex

KEY = HashKey(bytes(range(32)))


def kept_share_is_likely(kept: int, of: int, share: float) -> bool:
    """Whether so few or so many would come up more than once in a million draws: the binomial's own tails."""
    mass = [comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(of + 1)]
    return sum(mass[: kept + 1]) > 1e-6 and sum(mass[kept:]) > 1e-6


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_about_the_share_is_kept(share: float) -> None:
    sample = SessionSample(KEY, share)
    named = [Record(request_id=RequestId("x"), session_id=SessionId(f"s{i}")) for i in range(1000)]
    unknown = [Record(request_id=RequestId(f"r{i}")) for i in range(1000)]
    for records in (named, unknown):
        kept = sum(map(sample.keeps, records))
        assert kept_share_is_likely(kept, 1000, share), kept


def test_everything_is_kept_of_the_whole() -> None:
    assert all(SessionSample(KEY, 1.0).keeps(Record(request_id=RequestId(f"r{i}"))) for i in range(1000))


@given(st.text(), st.floats(0.001, 1), st.floats(0.001, 1))
def test_smaller_samples_are_parts_of_larger_ones(session: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    record = Record(request_id=RequestId("x"), session_id=SessionId(session.encode("utf-8", "replace").decode()))
    assert SessionSample(KEY, large).keeps(record) or not SessionSample(KEY, small).keeps(record)


def test_another_key_draws_another_sample() -> None:
    records = [Record(request_id=RequestId(f"r{i}")) for i in range(200)]
    draws = [[SessionSample(key, 0.5).keeps(r) for r in records] for key in (KEY, HashKey(bytes(32)))]
    assert draws[0] != draws[1]


turns = st.lists(
    st.tuples(st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=80,
)
"""Of which conversation each request is a turn, and whether the client names the conversation."""


@settings(deadline=None)
@given(turns, st.sampled_from([0.1, 0.5, 0.9]))
def test_every_session_is_kept_whole_or_not_at_all(drawn: list[tuple[int, bool]], share: float) -> None:
    index, sample = SessionIndex(4), SessionSample(KEY, share)
    lengths: dict[int, int] = defaultdict(int)
    kept: dict[str | None, set[bool]] = defaultdict(set)
    for at, (conversation, named) in enumerate(drawn):
        lengths[conversation] += 1
        turn = lengths[conversation]
        record = Record(
            request_id=RequestId(f"r{at}"),
            session_id=SessionId(f"named {conversation}") if named else None,
            arrival_ms=float(at),
            e2e_ms=0.5,
            prompt_tokens=4 * turn,
            output_tokens=1,
            block_hashes=[BlockHash(conversation * 1000 + block + 1) for block in range(turn)],
        )
        linked = index.link(record)
        assert linked.session_id is not None
        kept[linked.session_id].add(sample.keeps(linked))
    assert all(len(decisions) == 1 for decisions in kept.values())
