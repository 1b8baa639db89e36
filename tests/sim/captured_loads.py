"""Random loads on a small pool, and their captures by a tap with an exact clock."""

import random
from itertools import accumulate, pairwise

from msgspec.structs import replace

from sim.engine.simulation import request_columns
from sim.fit.capturedschedule import reconstruct
from sim.fit.schedule import Reconstruction
from sim.latency.modelfile import default_model, make_model
from sim.vllm.config import EngineConfig
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import predicted_records
from tracefile.records.schema import BlockHash, Meta, Record, RequestId

BLOCK_SIZE = 32
META = Meta(source="tap", model="tiny", block_size=BLOCK_SIZE)


class RandomLoad:
    """Prompts on shared prefixes and on earlier outputs, at random times."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._next_key = 1
        self._chains = [self._fresh(self._rng.randrange(2, 60)) for _ in range(3)]

    def records(self, count: int) -> list[Record]:
        now_ms, records = 0.0, []
        for number in range(count):
            records.append(self._record(number, now_ms))
            now_ms += 0.5 + self._rng.expovariate(1 / self._rng.choice([30, 120, 400]))
        return records

    def _fresh(self, blocks: int) -> list[int]:
        first, self._next_key = self._next_key, self._next_key + blocks
        return list(range(first, first + blocks))

    def _record(self, number: int, arrival_ms: float) -> Record:
        rng = self._rng
        start = rng.choice(self._chains[:3] if rng.random() < 0.5 else self._chains[-8:])
        start = start[: rng.randrange(1, min(len(start), 80) + 1)] if rng.random() < 0.3 else start[:80]
        prompt = (len(start) + rng.randrange(40)) * BLOCK_SIZE + rng.randrange(1, BLOCK_SIZE)
        output = rng.randrange(1, 90)
        chain = start + self._fresh((prompt + output - 1) // BLOCK_SIZE - len(start))
        self._chains.append(chain)
        hashes = [BlockHash(key) for key in chain]
        return Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=arrival_ms,
            stream=True,
            http_status=200,
            prompt_tokens=prompt,
            output_tokens=output,
            block_hashes=hashes[: prompt // BLOCK_SIZE],
            output_block_hashes=hashes[prompt // BLOCK_SIZE :],
        )


def random_engine(seed: int, *, async_scheduling: bool = False) -> EngineConfig:
    """A pool that some of the requests fill alone."""
    rng = random.Random(seed)
    return EngineConfig(
        num_gpu_blocks=rng.choice([140, 200, 300]),
        block_size=BLOCK_SIZE,
        max_num_seqs=rng.choice([4, 16, 32]),
        max_num_batched_tokens=rng.choice([256, 1024, 2048]),
        async_scheduling=async_scheduling,
    )


def captured(records: list[Record], engine: EngineConfig, frontend_ms: float = 0.0) -> list[Record]:
    """The trace of ``records`` on ``engine``, with cached tokens and preemptions."""
    costs = {name: parameter.value for name, parameter in default_model().parameters.items()}
    costs |= {"frontend_base_ms": frontend_ms, "frontend_ms_per_prompt_token": 0.0}
    model = make_model(costs, engine)
    arrivals = objects(plan_arrivals(META, records, engine.block_size))
    return predicted_records(Engine(arrivals, engine, model).run())


def reconstructed(records: list[Record], engine: EngineConfig) -> Reconstruction:
    return reconstruct(records, request_columns(plan_arrivals(META, records, BLOCK_SIZE), BLOCK_SIZE), engine)


def late_reads(records: list[Record], seed: int, most_ms: float) -> list[Record]:
    """The same, each read seen up to ``most_ms`` after its step's end."""
    rng, late = random.Random(seed), []
    for record in records:
        reads_ms = accumulate(record.itl_ms, initial=record.ttft_ms or 0.0)
        seen_ms = [read_ms + rng.uniform(0.0, most_ms) for read_ms in reads_ms]
        gaps_ms = [after - before for before, after in pairwise(seen_ms)]
        late.append(replace(record, ttft_ms=seen_ms[0], itl_ms=gaps_ms, e2e_ms=seen_ms[-1]))
    return late
