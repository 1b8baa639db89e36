"""A load as a job: cut into shards, and named."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.core.draws import TokenIds
from loadgen.core.job import UNSHARDED, Response, Send, Shard
from loadgen.core.lengths import LengthDistribution
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import LoadJob
from loadgen.text.prompts import common_prefix
from tests.tracefile.hashing.tokenwise import tokenwise
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import Record, RequestId

CONFIG = LoadConfig(url="http://x", trace=Path("t"), rate=5.0, number=12, turns=LengthDistribution(1, 3), seed=2)


def job(config: LoadConfig = CONFIG) -> LoadJob:
    return LoadJob(config=config, model="m", load_id="load-x", key=HashKey(bytes(32)), block_size=16)


def ids(sends: Iterable[Send]) -> list[RequestId]:
    return [send.build().request_id for send in sends]


def test_closed_loop_fills_all_slots() -> None:
    closed = job(replace(CONFIG, rate=None, parallel=5))
    assert [Shard(index, 4).share_of(10) for index in range(4)] == [3, 3, 2, 2]
    assert len(ids(closed.open(UNSHARDED).plan())) == 5
    assert [len(ids(closed.open(Shard(index, 2)).plan())) for index in range(2)] == [3, 2]
    # One request a session: all of them wait for slots of the sender's.
    single = job(replace(CONFIG, rate=None, parallel=5, turns=LengthDistribution(1, 1)))
    sends = list(single.open(UNSHARDED).plan())
    assert len(sends) == 12
    assert {send.due_ms for send in sends} == {None}


@pytest.mark.parametrize(("group", "shares"), [(1, {0, 21}), (3, {0, 21, 26, 27, 28, 29, 30})])
def test_prompts_of_all_workers_share_keys(group: int, shares: set[int]) -> None:
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
    shared = {(left, right): common_prefix(prompts[left], prompts[right]) for left in prompts for right in prompts}
    assert {count for (left, right), count in shared.items() if left != right} >= shares
    for (left, right), count in shared.items():
        size = min(len(keys[left]), len(keys[right]))
        assert np.flatnonzero(keys[left][:size] != keys[right][:size])[:1].tolist() == [count][: count < size]
