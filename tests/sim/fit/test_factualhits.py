"""Hits as a capture reports them: the reported number, on blocks that running requests hold where contents agree."""

from librt.vecs import vec
from mypy_extensions import i64

from measure.cache.vectors import floats
from sim.engine.simulation import simulate
from sim.fit.variants import Capture, factual_columns
from sim.latency.modelfile import make_model
from sim.latency.stepcost import KV_TOKENS, REPEATED_KV_TOKENS
from sim.vllm.config import EngineConfig
from sim.vllm.kvcache import FactualCache
from sim.vllm.request import Request
from sim.workload.arrivals import plan_arrivals
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

SIZE = 16
CHAIN = [BlockHash(number) for number in (101, 102, 103, 104)]


def make_record(name: str, arrival_ms: float, cached: int) -> Record:
    return Record(
        request_id=RequestId(name),
        arrival_ms=arrival_ms,
        stream=True,
        prompt_tokens=4 * SIZE + 1,
        output_tokens=8,
        max_tokens=8,
        cached_tokens=cached,
        block_hashes=list(CHAIN),
    )


def captured(records: list[Record]) -> Capture:
    arrivals = plan_arrivals(Meta(block_size=SIZE), records, SIZE, path="t")
    return Capture(records, arrivals, [record.cached_tokens or 0 for record in records], None)


def request(name: str, cached: int) -> Request:
    return Request(name, 4 * SIZE + 1, 8, vec[i64](CHAIN), num_keys=4, hit_limit=cached // SIZE)


def test_reported_hits_are_used() -> None:
    cache = FactualCache(SIZE)
    assert [cache.look_up(request(name, cached)) for name, cached in (("a", 0), ("b", 48), ("c", 32))] == [0, 48, 32]


def test_referenced_blocks_are_hit_first() -> None:
    cache, (a, b, c) = FactualCache(SIZE), (request("a", 0), request("b", 48), request("c", 32))
    for admitted, held_before in ((a, 0), (b, 3), (c, 2)):
        before = cache.pool.num_repeated
        assert cache.admit(admitted, cache.look_up(admitted), 65 - admitted.hit_limit * SIZE)
        cache.cache_blocks(admitted, 64)
        assert cache.pool.num_repeated - before == held_before
    cache.free(a)
    cache.free(b)
    cache.free(c)
    assert cache.pool.num_repeated == 0
    assert cache.admit(c, cache.look_up(c), 33)
    assert cache.pool.num_repeated == 0


def test_hits_without_hashes_get_unique_keys() -> None:
    records = [make_record("a", 0.0, 0), make_record("b", 0.0, 48)]
    for record in records:
        record.block_hashes = record.block_hashes[:2] if record.block_hashes else None
    requests = factual_columns(captured(records), SIZE)[1].make(floats([1.0, 1.0]))
    assert [(item.num_keys, item.hit_limit) for item in requests] == [(0, 0), (3, 3)]
    cache = FactualCache(SIZE)
    assert [cache.look_up(item) for item in requests] == [0, 48]


def test_step_loop_uses_reported_hits() -> None:
    """Two requests at once that hit three blocks each: one of the two reads is repeated."""
    records = [make_record("a", 0.0, 48), make_record("b", 0.0, 48)]
    config = EngineConfig(num_gpu_blocks=100, block_size=SIZE, async_scheduling=False)
    arrivals, columns = factual_columns(captured(records), SIZE)
    simulation = simulate(
        arrivals,
        config,
        make_model({"t0_ms": 1.0}, config),
        columns=columns,
        cache=FactualCache(SIZE),
        keeps_rows=True,
    )
    decoding = simulation.rows[simulation.rows[:, KV_TOKENS] > 0]
    assert set(decoding[:, REPEATED_KV_TOKENS].tolist()) == {48.0}
