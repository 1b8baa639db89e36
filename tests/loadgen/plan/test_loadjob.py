"""A load as a job: cut into shards, named, and taken up again."""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.draws import TokenIds
from loadgen.core.job import WHOLE, Shard
from loadgen.core.lengths import LengthDistribution
from loadgen.core.plan import Response, Send
from loadgen.datasets.session import TokenizerLengths
from loadgen.plan.config import LoadConfig, Pattern
from loadgen.plan.loadjob import LoadJob, load_name, shard_of_cap
from loadgen.text.prefixtruth import common_prefix
from loadgen.text.tokenizer import LocalTokenizer
from tests.fakes.vocabularies import write_model
from tests.tracefile.hashing.tokenwise import tokenwise
from tracefile import HashKey, InputError, Record, RequestId

CONFIG = LoadConfig(url="http://x", trace=Path("t"), rate=5.0, number=12, turns=LengthDistribution(1, 3), seed=2)


def job(config: LoadConfig = CONFIG) -> LoadJob:
    return LoadJob(config=config, model="m", load_id="load-x", key=HashKey(bytes(32)), block_size=16)


def ids(sends: Iterable[Send]) -> list[RequestId]:
    return [send.build().request_id for send in sends]


def test_a_cap_is_divided_among_shards() -> None:
    assert [shard_of_cap(10, Shard(index, 4)) for index in range(4)] == [3, 3, 2, 2]
    assert shard_of_cap(None, Shard(3, 4)) is None
    with pytest.raises(InputError, match="--procs: 4 with at most 3 at once"):
        shard_of_cap(3, Shard(3, 4))


def test_roots_of_all_shards_are_the_whole_plans() -> None:
    whole = ids(job().open(WHOLE).plan())
    assert len(set(whole)) == 12
    parts = [ids(job().open(Shard(index, 3)).plan()) for index in range(3)]
    assert sorted(request for part in parts for request in part) == sorted(whole)


def test_a_closed_loop_begins_as_many_as_it_may() -> None:
    closed = job(replace(CONFIG, rate=None, parallel=5))
    assert len(ids(closed.open(WHOLE).plan())) == 5
    assert [len(ids(closed.open(Shard(index, 2)).plan())) for index in range(2)] == [3, 2]
    # One request a session: all of them wait for slots of the sender's.
    single = job(replace(CONFIG, rate=None, parallel=5, turns=LengthDistribution(1, 1)))
    sends = list(single.open(WHOLE).plan())
    assert len(sends) == 12
    assert {send.due_ms for send in sends} == {None}


@given(
    services=st.lists(st.integers(1, 2000), min_size=30, max_size=30),
    slots=st.integers(1, 6),
    pattern=st.sampled_from(["poisson", "constant"]),
)
def test_sessions_take_free_places_in_order_of_arrival(services: list[int], slots: int, pattern: Pattern) -> None:
    """A cap on open sessions is a queue with so many servers, first come first served: its starts are known."""
    config = replace(CONFIG, pattern=pattern, turns=LengthDistribution(1, 1), number=30, parallel_sessions=slots)
    opened = job(config).open(WHOLE)
    due = [session.due_ms or 0.0 for session in opened.load.workload]
    free, expected = [0.0] * slots, []
    for at, service in zip(due, services, strict=True):
        start = max(at, heapq.heappop(free))
        expected.append(start)
        heapq.heappush(free, start + service)
    assert starts(opened.plan(), services) == pytest.approx(expected)


def starts(plan: Iterable[Send], services: list[int]) -> list[float]:
    """When each of the plan's requests starts if the nth to start takes so long, and follow-ups come at once."""
    started: list[float] = []
    waiting = [(send.due_ms or 0.0, order, send) for order, send in enumerate(plan)]
    running: list[tuple[float, int, Send]] = []
    order = len(waiting)
    heapq.heapify(waiting)
    while waiting or running:
        if waiting and (not running or waiting[0][0] <= running[0][0]):
            at, _, send = heapq.heappop(waiting)
            heapq.heappush(running, (at + services[len(started)], len(started), send))
            started.append(at)
            continue
        end_ms, number, send = heapq.heappop(running)
        record = Record(request_id=RequestId(str(number)))
        for following in send.then(Response(record, end_ms, None, None, "")):
            assert following.from_start
            order += 1
            heapq.heappush(waiting, (max(end_ms, following.due_ms or 0.0), order, following))
    return started


@pytest.mark.parametrize(("group", "shares"), [(1, {0, 21}), (3, {0, 21, 26, 27, 28, 29, 30})])
def test_prompts_of_all_shards_share_as_many_keys_as_tokens(group: int, shares: set[int]) -> None:
    config = replace(
        CONFIG, prefix_count=2, prefix_tokens=21, prompt_tokens=LengthDistribution(5, 9), number=12, group_size=group
    )
    records: list[Record] = []
    prompts: dict[RequestId, TokenIds] = {}
    for index in range(2):
        queue = deque(replace(job(config), branches=True).open(Shard(index, 2)).plan())
        while queue:
            send = queue.popleft()
            request = send.build()
            prompts[request.request_id] = np.array(msgspec.json.decode(request.body)["prompt"], np.uint32)
            record = Record(request_id=request.request_id, prompt_tokens=request.prompt_tokens, output_tokens=3)
            answer = Response(record, 0.0, [len(prompts), 2, 3], None, "")
            queue += send.then(answer)
            records.append(send.describe(answer))
    keys = {record.request_id: np.array(record.block_hashes, np.uint64) for record in tokenwise(records, 16)}
    shared = {(one, other): common_prefix(prompts[one], prompts[other]) for one in prompts for other in prompts}
    assert {count for (one, other), count in shared.items() if one != other} >= shares
    for (one, other), count in shared.items():
        size = min(len(keys[one]), len(keys[other]))
        assert np.flatnonzero(keys[one][:size] != keys[other][:size])[:1].tolist() == [count][: count < size]


def test_equal_loads_have_equal_names_wherever_they_go() -> None:
    elsewhere = replace(CONFIG, url="http://y", trace=Path("u"), model="other", timeout_s=None)
    assert load_name(elsewhere) == load_name(CONFIG)
    assert load_name(replace(CONFIG, seed=3)) != load_name(CONFIG)


def test_a_dataset_names_its_load_by_its_bytes(tmp_path: Path) -> None:
    names = []
    for name, text in (("a", "1"), ("b", "2"), ("c", "1")):
        (tmp_path / name).write_text(text)
        config = replace(CONFIG, turns=LengthDistribution(1, 1), dataset="trie", dataset_path=tmp_path / name)
        names.append(load_name(config))
    assert names[0] == names[2] != names[1]


def test_sessions_that_are_over_are_not_sent_again() -> None:
    opened = job().open(WHOLE)
    sessions = list(opened.load.workload)
    names = [
        [opened.load.request_id(session.index, turn) for turn in range(len(session.turns))] for session in sessions
    ]
    several = next(index for index, session in enumerate(sessions) if len(session.turns) > 1)
    single = next(index for index, session in enumerate(sessions) if len(session.turns) == 1)
    failed = next(index for index, session in enumerate(sessions) if len(session.turns) > 1 and index != several)
    planned = opened.planned()
    assert planned is not None
    # One whole, one that failed in its first turn and so is over too, and one begun: that is sent again whole.
    ended = dict.fromkeys(names[single], True) | {names[failed][0]: False, names[several][0]: True}
    assert set(opened.resume(ended)) == {*names[single], names[failed][0]}
    assert opened.planned() == planned - len(names[single]) - len(names[failed])
    sent = ids(opened.plan())
    assert len(sent) == 10
    assert names[several][0] in sent
    assert not {names[single][0], names[failed][0]} & set(sent)


def test_a_resumed_load_keeps_its_digest() -> None:
    opened, resumed = job().open(WHOLE), job().open(WHOLE)
    resumed.resume({opened.load.request_id(0, 0): False})
    assert resumed.digest_share() == opened.digest_share()


def test_a_tokenizer_counts_and_cuts_texts(tmp_path: Path) -> None:
    lengths = TokenizerLengths(LocalTokenizer(write_model("deepseek", tmp_path / "model")))
    text = "The quick brown fox jumps over the lazy dog. " * 5
    count = lengths.count(text)
    assert 40 <= count <= 60
    assert lengths.cut(text, count) == text
    cut = lengths.cut(text, 10)
    assert text.startswith(cut)
    assert lengths.count(cut) == 10
    # A character of several tokens is not torn.
    assert "\ufffd" not in lengths.cut("𓀀𓀁𓀂", 2)
