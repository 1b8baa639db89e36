"""Sessions: the rules case by case, and against an oracle that compares every pair of requests."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefile.boundedmap import BoundedMap
from tracefile.records.schema import BlockHash, Record, RequestId, SessionId
from tracefile.sessions import SessionIndex, infer_sessions

B = 4


def request(
    name: str,
    arrival: float,
    end: float,
    prompt: list[int],
    output: list[int] | None = None,
    *,
    session: str | None = None,
    status: str = "ok",
) -> Record:
    """A request whose chain is given as block names; each list is a path from the root, so names are hashes."""
    record = Record(
        request_id=RequestId(name),
        arrival_ms=arrival,
        e2e_ms=end - arrival,
        prompt_tokens=len(prompt) * B + 1,
        block_hashes=[BlockHash(block) for block in prompt],
        output_block_hashes=None if output is None else [BlockHash(block) for block in output],
        session_id=None if session is None else SessionId(session),
    )
    return msgspec.convert(msgspec.to_builtins(record) | {"status": status}, Record)


def links(records: list[Record]) -> dict[str, tuple[str | None, int | None]]:
    return {record.request_id: (record.parent_id, record.turn) for record in infer_sessions(records, B).records}


def online(records: list[Record]) -> dict[str, tuple[str | None, int | None]]:
    index = SessionIndex(B)
    linked = [index.link(record) for record in records]
    index.check_integrity()
    return {record.request_id: (record.parent_id, record.turn) for record in linked}


def test_conversation_is_linked_with_think_times() -> None:
    trace = [
        request("a", 0, 10, [1, 2], [3]),
        request("b", 25, 30, [1, 2, 3, 4], [5]),
        request("c", 31, 40, [1, 2, 3, 4, 5, 6]),
    ]
    reported = infer_sessions(trace, B)
    assert [(r.parent_id, r.turn, r.think_ms) for r in reported.records] == [(None, 1, None), ("a", 2, 15), ("b", 3, 1)]
    assert {r.session_id for r in reported.records} == {"chain-a"}
    assert {r.session_source for r in reported.records} == {"inferred"}
    assert (reported.inferred, reported.ambiguous) == (2, 0)
    assert online(trace) == links(trace)


def test_shared_prefix_is_no_parent() -> None:
    trace = [
        request("alone", 0, 10, [1, 2]),
        request("b", 20, 30, [1, 2, 3]),
        request("c", 40, 50, [1, 2, 4]),
    ]
    assert (links(trace)["b"], links(trace)["c"]) == ((None, 1), (None, 1))
    # Online, when b is given nothing tells it from a true second turn; c is the evidence, and comes later.
    assert (online(trace)["b"], online(trace)["c"]) == (("alone", 2), (None, 1))


def test_explicit_session_ids_override_chains() -> None:
    trace = [
        request("a", 0, 10, [1, 2], [3], session="s"),
        request("other", 0, 12, [1, 2], [3], session="t"),
        request("b", 20, 30, [9], session="s"),
        request("branch", 25, 31, [8], session="s"),
        request("c", 40, 50, [7], session="s"),
    ]
    reported = infer_sessions(trace, B)
    assert [(r.parent_id, r.turn, r.think_ms) for r in reported.records] == [
        (None, 1, None),
        (None, 1, None),
        ("a", 2, 10),
        ("a", 2, 15),  # b had not ended
        ("branch", 3, 9),  # the latest end
    ]
    assert {r.session_source for r in reported.records} == {"explicit"}
    assert reported.inferred == 0


def test_continuation_without_session_id_joins_as_inferred() -> None:
    trace = [request("a", 0, 10, [1, 2], [3], session="s"), request("b", 20, 30, [1, 2, 3, 4])]
    reported = infer_sessions(trace, B).records[1]
    assert (reported.session_id, reported.session_source, reported.parent_id) == ("s", "inferred", "a")


def test_explicit_links_are_preserved() -> None:
    known = request("b", 20, 30, [9], session="s")
    known.parent_id, known.turn, known.think_ms = RequestId("elsewhere"), 7, 3.0
    reported = infer_sessions([request("a", 0, 10, [1], session="s"), known], B).records[1]
    assert (reported.parent_id, reported.turn, reported.think_ms) == ("elsewhere", 7, 3.0)


def test_without_hashes_no_session_is_inferred() -> None:
    record = Record(request_id=RequestId("a"), arrival_ms=0.0, e2e_ms=1.0, prompt_tokens=100)
    assert infer_sessions([record], B).records == [record]


@pytest.mark.parametrize("limit", [2, 8, 64])
def test_memory_stays_within_its_bound(limit: int) -> None:
    index = SessionIndex(B, max_blocks=limit, max_sessions=2)
    for i in range(200):
        index.link(request(f"r{i}", i, i + 1, [10 * i + j for j in range(5)], session=f"s{i}" if i % 2 else None))
        index.check_integrity()
        assert len(index._blocks) <= limit
        assert len(index._sessions) <= 2


def test_earliest_requests_on_a_block_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefile.promptends.MAX_ENDS", 4)
    index = SessionIndex(B)
    for i in range(100):
        index.link(request(f"r{i}", i, i + 0.5, [1], [2], session="s" if i % 2 else None))
        index.check_integrity()
    assert index.link(request("next", 200, 201, [1, 2, 3])).parent_id == "r99"
    # Only old ends would do for a request that arrived long ago, and they are forgotten: no parent, not a wrong one.
    assert index.link(request("late", 3, 202, [1, 2, 3])).parent_id is None


def test_links_do_not_depend_on_small_disorder() -> None:
    index = SessionIndex(B)
    index.link(request("a2", 1, 12, [1], [2]))
    index.link(request("a1", 0, 10, [1], [2]))
    assert index.link(request("b", 20, 30, [1, 2, 3])).parent_id == "a2"
    assert index.link(request("c", 11, 31, [1, 2, 4])).parent_id == "a1"
    index.check_integrity()


def test_bounded_map_evicts_the_least_recently_touched() -> None:
    recent: BoundedMap[str, int] = BoundedMap(2)
    recent["a"], recent["b"] = 1, 2
    assert recent.touch("a", 0) == 1
    assert recent.touch_all(["c", "a"], 0) == [(1, 1)]
    assert ("a" in recent, "b" in recent, "c" in recent) == (True, False, True)
    recent.check_integrity()


# Paths in a small tree, so that chains collide: block names carry their whole path, as chained hashes do.
paths = st.lists(st.integers(0, 1), min_size=1, max_size=5)


def chained(path: list[int]) -> list[int]:
    names, name = [], 1
    for step in path:
        name = 2 * name + step
        names.append(name)
    return names


@st.composite
def traces(draw: st.DrawFn) -> list[Record]:
    records = []
    for i in range(draw(st.integers(1, 12))):
        chain = chained(draw(paths))
        cut = draw(st.integers(1, len(chain)))
        arrival = float(draw(st.integers(0, 30)))
        end = arrival + draw(st.integers(1, 15)) + i / 100  # ends differ, so that ties have one answer
        record = request(f"r{i}", arrival, end, chain[:cut], draw(st.sampled_from([None, chain[cut:]])))
        if draw(st.integers(0, 9)) == 0:
            record.status = "error"
        if draw(st.integers(0, 9)) == 0:
            record.hashable_blocks = draw(st.integers(0, cut))
        if draw(st.integers(0, 5)) == 0:
            record.session_id = SessionId("s")
        records.append(record)
    return sorted(records, key=lambda record: record.end_ms() or 0.0)


def oracle_parent(child: Record, evidence: list[Record]) -> str | None:
    """The rules read off one by one, over every request in ``evidence``."""
    arrival = child.arrival_ms or 0.0
    if child.session_id is not None:
        same = [r for r in evidence if r.session_id == child.session_id and end(r) <= arrival]
        return max(same, key=end).request_id if same else None
    prompt, _, complete = oracle_chain(child)
    enders = [r for r in evidence if oracle_chain(r)[2] and r.status == "ok"]
    by_output: list[tuple[int, bool, Record]] = []
    by_prompt: list[tuple[int, Record]] = []
    for r in enders:
        local, chain, _ = oracle_chain(r)
        if end(r) > arrival or prompt[: len(local)] != local:
            continue
        common = next(
            (i for i, pair in enumerate(zip(prompt, chain, strict=False)) if pair[0] != pair[1]),
            min(len(prompt), len(chain)),
        )
        continues = len(local) < len(prompt) or (not complete and len(local) == len(prompt))
        if common > len(local):
            by_output.append((common, common == len(chain), r))
        if local and continues and not oracle_shared(local, enders, evidence):
            by_prompt.append((len(local), r))
    best = [max(by_output, key=lambda item: (item[0], item[1], end(item[2])))[::2]] if by_output else []
    best += [max(by_prompt, key=lambda item: (item[0], end(item[1])))] if by_prompt else []
    return max(best, key=lambda item: (item[0], end(item[1])))[1].request_id if best else None


def oracle_shared(prompt: list[BlockHash], enders: list[Record], evidence: list[Record]) -> bool:
    first_end = min(end(r) for r in enders if oracle_chain(r)[0] == prompt)
    following = set()
    for r in evidence:
        other, _, complete = oracle_chain(r)
        continues = len(other) > len(prompt) or (not complete and len(other) == len(prompt))
        if other[: len(prompt)] == prompt and continues:
            if (r.arrival_ms or 0.0) < first_end:
                return True
            following.update(other[len(prompt) : len(prompt) + 1])
    return len(following) > 1


def oracle_chain(record: Record) -> tuple[list[BlockHash], list[BlockHash], bool]:
    hashes = list(record.block_hashes or [])
    true = hashes if record.hashable_blocks is None else hashes[: record.hashable_blocks]
    complete = len(true) == len(hashes)
    return true, true + (list(record.output_block_hashes or []) if complete else []), complete


def end(record: Record) -> float:
    return record.end_ms() or 0.0


@settings(max_examples=120, deadline=None)
@given(traces())
def test_offline_links_equal_the_oracle(trace: list[Record]) -> None:
    reported = infer_sessions(trace, B).records
    assert [r.parent_id for r in reported] == [oracle_parent(r, trace) for r in trace]


@settings(max_examples=120, deadline=None)
@given(traces())
def test_online_links_equal_the_oracle(trace: list[Record]) -> None:
    index = SessionIndex(B)
    reported = [index.link(record) for record in trace]
    assert [r.parent_id for r in reported] == [oracle_parent(r, trace[: i + 1]) for i, r in enumerate(trace)]


@settings(max_examples=100, deadline=None)
@given(traces())
def test_turns_increase_from_parents_that_ended_before(trace: list[Record]) -> None:
    reported = {record.request_id: record for record in infer_sessions(trace, B).records}
    for record in reported.values():
        if record.parent_id is None:
            assert (record.turn, record.think_ms) == (1, None)
            continue
        parent = reported[record.parent_id]
        assert record.turn == (parent.turn or 0) + 1
        assert record.session_id == parent.session_id
        assert record.think_ms == pytest.approx((record.arrival_ms or 0.0) - end(parent))
        assert record.think_ms is not None
        assert record.think_ms >= 0


def test_oracle_tree_identifies_blocks_by_path() -> None:
    assert chained([0, 1, 1]) == [2, 5, 11]
    assert all(child // 2 == parent for parent, child in pairwise(chained([1, 0, 1, 1])))
