"""Synthetic calibration captures, of engines whose parameters are known. Loaded by the fixture ``synthetic``."""

import math
import random
from typing import Any

from sim.latency.modelfile import Model
from sim.workload.arrivals import plan_arrivals
from tests.sim.oracles.arrival import objects
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.simulation import predicted_records
from tracefile.records.schema import BlockHash, Meta, Record, RequestId, SessionId
from tracefile.records.schema import Engine as EngineInfo

BLOCK_SIZE = 32


class Blocks:
    """Unique block hashes, each continued by as many as a record needs."""

    def __init__(self) -> None:
        self.next = 1

    def extend(self, chain: list[BlockHash], blocks: int) -> list[BlockHash]:
        lacking = max(0, blocks - len(chain))
        first, self.next = self.next, self.next + lacking
        return chain[:blocks] + [BlockHash(number) for number in range(first, self.next)]


def calibration(seed: int, prompts: int = 40, mixed: int = 80) -> list[Record]:
    """Isolated prompts of many sizes, each extended warm; then prompts and decodes at once."""
    rng, blocks, records, now_ms = random.Random(seed), Blocks(), [], 0.0

    def add(
        name: str, session: str, tokens: int, output: int, chain: list[BlockHash], *, parent: str | None = None
    ) -> None:
        records.append(
            Record(
                request_id=RequestId(name),
                session_id=SessionId(session),
                parent_id=None if parent is None else RequestId(parent),
                turn=1 if parent is None else 2,
                arrival_ms=now_ms,
                stream=True,
                prompt_tokens=tokens,
                output_tokens=output,
                block_hashes=chain[: tokens // BLOCK_SIZE],
                output_block_hashes=chain[tokens // BLOCK_SIZE : (tokens + output - 1) // BLOCK_SIZE],
            )
        )

    for number in range(prompts):
        tokens = round(64 * (11_000 / 64) ** (number / max(prompts - 1, 1)))
        output = rng.randrange(8, 40)
        first = blocks.extend([], (tokens + output - 1) // BLOCK_SIZE)
        add(f"cold {number}", f"s{number}", tokens, output, first)
        now_ms += 3_000
        longer = tokens + output + rng.choice([20, 200, 1_500])
        second = blocks.extend(first[: (tokens + output - 1) // BLOCK_SIZE], (longer + 15) // BLOCK_SIZE)
        add(f"warm {number}", f"s{number}", longer, 16, second, parent=f"cold {number}")
        now_ms += 2_000
    for number in range(mixed):
        tokens, output = rng.choice([100, 700, 2_500, 6_000]), rng.randrange(2, 90)
        add(f"mixed {number}", f"m{number}", tokens, output, blocks.extend([], (tokens + output) // BLOCK_SIZE))
        now_ms += rng.expovariate(1 / 500)
    return records


def engine_of(model: Model, **changes: object) -> EngineInfo:
    """Engine metadata of a capture of this model."""
    config = model.engine
    settings = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "async_scheduling": config.async_scheduling,
    }
    return EngineInfo(**(settings | changes))  # type: ignore[arg-type]


class UnevenEngine(Engine):
    """An engine whose step times vary from the model by a log-normal factor each."""

    def __init__(self, *arguments: Any, spread: float, seed: int, **options: Any) -> None:
        super().__init__(*arguments, fast_forward=False, **options)
        self._random = random.Random(seed)
        self._spread = spread

    def _advance(self, row: list[float], end_ms: float | None = None) -> None:
        assert end_ms is None
        start_ms = self.now_ms
        super()._advance(row)
        duration_ms = (self.now_ms - start_ms) * math.exp(self._random.gauss(0.0, self._spread))
        self.now_ms = self.timeline.ends_ms[-1] = start_ms + duration_ms
        self.timeline.delivered_ms[-1] = max([self.now_ms, *self.timeline.delivered_ms[-2:-1]])


def capture(records: list[Record], model: Model, seed: int = 0, spread: float = 0.05) -> list[Record]:
    """What a tap before an engine of exactly this model would have recorded, but for the ``spread`` of its steps."""
    arrivals = objects(plan_arrivals(Meta(block_size=BLOCK_SIZE), records, model.engine.block_size))
    return predicted_records(UnevenEngine(arrivals, model.engine, model, spread=spread, seed=seed).run())
