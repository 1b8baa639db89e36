"""A scaled trace has the source's tree, lengths, turns and rhythm, under new names."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from measure.cache.hitcurve import HitCurve, hit_curve
from sim.workload.accesses import read_accesses
from tracefile import (
    BlockHash,
    HashInfo,
    InputError,
    Meta,
    Record,
    RequestId,
    SessionId,
    TraceWriter,
    load_trace,
    trace_digest,
)
from tracefile.__main__ import main
from tracefile.study.synthesis import Source, synthesize

META = Meta(source="tap", model="m", block_size=16, hash=HashInfo(algorithm="xxh3_64", key_id="ab"))


def request(name: str, at_ms: float, chain: list[int], session: str | None = None, parent: str | None = None) -> Record:
    return Record(
        request_id=RequestId(name),
        session_id=None if session is None else SessionId(session),
        parent_id=None if parent is None else RequestId(parent),
        arrival_ms=at_ms,
        ttft_ms=5.0,
        e2e_ms=20.0,
        prompt_tokens=16 * len(chain) + 3,
        output_tokens=len(name),
        cached_tokens=16,
        block_hashes=[BlockHash(block) for block in chain],
        extra={"note": name},
    )


def small_trace(sessions: int = 200, seed: int = 5) -> list[Record]:
    """Sessions of one to four turns on Zipf-like prefixes, arriving in bursts."""
    random = np.random.default_rng(seed)
    records, at_ms, block = [], 0.0, 10_000
    for number in range(sessions):
        at_ms += float(random.choice([0.0, 10.0, 400.0]))
        prefix = min(int(random.zipf(1.6)), 20)
        chain, parent, turn_ms = [prefix, 100 + prefix, 200 + prefix], None, at_ms
        for turn in range(random.integers(1, 5)):
            chain = [*chain, *range(block, block + int(random.integers(1, 5)))]
            block += 10
            records.append(request(f"r{number}.{turn}", turn_ms, chain, f"s{number}", parent))
            parent, turn_ms = f"r{number}.{turn}", turn_ms + 20.0 + float(random.integers(100, 5_000))
    return sorted(records, key=lambda record: record.arrival_ms or 0.0)


def write(path: Path, records: list[Record]) -> Path:
    with TraceWriter(path, META) as writer:
        for record in records:
            writer.write(record)
    return path


def scaled(records: list[Record], times: float, seed: int = 0) -> list[Record]:
    return list(synthesize(Source(records, "t"), times, seed))


def hit_rate(curve: HitCurve, blocks: int) -> float:
    return curve.hits_at(blocks) * curve.block_size / curve.input_tokens


def test_every_copy_of_a_conversation_is_whole_and_keeps_its_lengths_turns_and_gaps() -> None:
    source = small_trace()
    found = scaled(source, 3)
    assert [record.arrival_ms for record in found] == sorted(record.arrival_ms or 0.0 for record in found)
    assert len({record.request_id for record in found}) == len(found) == 3 * len(source)

    def shapes(records: list[Record]) -> Counter[tuple[tuple[int | None, int | None, float], ...]]:
        sessions: dict[SessionId | None, list[Record]] = {}
        for record in records:
            sessions.setdefault(record.session_id, []).append(record)
        return Counter(
            tuple(
                (r.prompt_tokens, r.output_tokens, round((r.arrival_ms or 0.0) - (turns[0].arrival_ms or 0.0), 3))
                for r in turns
            )
            for turns in sessions.values()
        )

    assert shapes(found) == Counter({shape: 3 * count for shape, count in shapes(source).items()})
    by_id = {record.request_id: record for record in found}
    for record in found:
        if record.parent_id is not None:
            parent = by_id[record.parent_id]
            assert parent.session_id == record.session_id
            assert (record.block_hashes or [])[: len(parent.block_hashes or [])] == parent.block_hashes


def tree_degrees(records: list[Record]) -> Counter[tuple[int, int]]:
    """How many blocks there are by depth and by number of requests that have them."""
    users = Counter((block, depth) for record in records for depth, block in enumerate(record.block_hashes or ()))
    return Counter((depth, count) for (_, depth), count in users.items())


def test_new_trees_are_like_the_old_ones() -> None:
    source = small_trace()
    assert tree_degrees(scaled(source, 4)) == Counter({key: 4 * count for key, count in tree_degrees(source).items()})


def test_nothing_of_the_source_is_left_but_its_shape() -> None:
    source = small_trace(20)
    found = scaled(source, 2)
    old = {block for record in source for block in record.block_hashes or ()}
    assert not old & {block for record in found for block in record.block_hashes or ()}
    assert not {record.request_id for record in source} & {record.request_id for record in found}
    assert all(record.ttft_ms is record.e2e_ms is record.cached_tokens is None for record in found)
    assert not any(record.extra for record in found)
    assert all((record.think_ms is None) == (record.parent_id is None) for record in found)


def test_the_seed_decides_everything() -> None:
    source = small_trace(30)
    assert scaled(source, 2.5, seed=1) == scaled(source, 2.5, seed=1)
    other = scaled(source, 2.5, seed=2)
    assert not {r.request_id for r in other} & {r.request_id for r in scaled(source, 2.5, seed=1)}


@pytest.mark.parametrize("times", [0.25, 1, 6.5])
def test_arrivals_keep_span_and_number(times: float) -> None:
    source = [record for record in small_trace(2_000) if record.parent_id is None]
    found = scaled(source, times)
    assert len(found) == pytest.approx(times * len(source), rel=0.15 if times < 1 else 0.02)
    assert found[0].arrival_ms == source[0].arrival_ms
    assert found[-1].arrival_ms == pytest.approx(source[-1].arrival_ms, rel=0.05)


def test_bursts_stay_bursts() -> None:
    source = [record for record in small_trace(2_000) if record.parent_id is None]

    def gaps(records: list[Record]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        found = np.diff([record.arrival_ms or 0.0 for record in records])
        return np.sort(found / found.mean())

    old, new = gaps(source), gaps(scaled(source, 5))
    quantiles = np.linspace(0, 1, 1001)
    distance = np.abs(np.quantile(old, quantiles) - np.quantile(new, quantiles)).mean()
    assert distance < 0.05  # Wasserstein-1, in mean gaps
    assert new.std() == pytest.approx(old.std(), rel=0.05)


def test_a_cache_that_grows_with_the_trees_hits_alike(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", small_trace(1_000))
    target = tmp_path / "b.jsonl"
    assert main(["convert", str(source), str(target), "--scale", "8", "--seed", "3"]) == 0
    old, new = (hit_curve(read_accesses(path)) for path in (source, target))
    assert new.max_hit_blocks == 8 * old.max_hit_blocks
    sizes = range(50, 3_000, 50)
    assert max(abs(hit_rate(old, size) - hit_rate(new, 8 * size)) for size in sizes) < 0.03
    meta, _ = load_trace(target)
    assert meta.source is None
    assert meta.workload is not None
    assert (meta.workload.pattern, meta.workload.source_digest) == ("synthetic", trace_digest(source))
    assert meta.workload.extra == {"scale": 8.0}
    assert main(["check", str(target)]) == 0


def test_memory_follows_the_source_not_the_result() -> None:
    source = Source(small_trace(50), "t")
    made = synthesize(source, 10_000)
    first = [next(made) for _ in range(10)]
    assert len({record.request_id for record in first}) == 10


@pytest.mark.parametrize("times", ["0", "1e11", "nan"])
def test_a_scale_that_is_none_is_refused(tmp_path: Path, times: str) -> None:
    path = write(tmp_path / "a.jsonl", small_trace(3))
    with pytest.raises(InputError, match="--scale"):
        main(["convert", str(path), str(tmp_path / "b"), "--scale", times])


@pytest.mark.skipif("KVTAPE_DATA" not in os.environ, reason="KVTAPE_DATA names no folder with published traces")
def test_mooncake_scaled_hits_alike(tmp_path: Path) -> None:
    source = Path(os.environ["KVTAPE_DATA"]) / "mooncake" / "conversation_trace.jsonl"
    target = tmp_path / "b.jsonl.zst"
    assert main(["convert", str(source), str(target), "--scale", "3"]) == 0
    old, new = (hit_curve(read_accesses(path)) for path in (source, target))
    assert new.max_hit_blocks == 3 * old.max_hit_blocks == 3 * 105_592
    for size in (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000):
        assert hit_rate(new, 3 * size) == pytest.approx(hit_rate(old, size), abs=0.01)
