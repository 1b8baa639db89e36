"""A load's plan carried out by a simulated engine in virtual time, and the capture of a tap between the two.

Two minutes of ``loadgen --pattern calibration`` take a second or two.
"""

import heapq
import random
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.job import UNSHARDED, Response, Send
from loadgen.plan.config import LoadConfig
from loadgen.plan.loadjob import LoadJob
from sim.latency.modelfile import Model
from tests.sim.oracles.arrival import Arrival
from tests.sim.oracles.plain_engine import Engine
from tests.sim.oracles.readable.rows import reception_ms
from tests.sim.oracles.simulation import RequestRun, predicted_records
from tests.sim.synthetic import engine_of
from tracefile.files.writing import TraceWriter
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey
from tracefile.records.schema import Meta, Record

KEY = HashKey(bytes(32))


class PlannedEngine(Engine):
    """An engine whose requests follow a plan: the next request may depend on the last response.

    ``spread``: each step time varies from the model by an independent log-normal factor.
    ``delay_ms``: each response is recorded late by a uniform delay up to this maximum.
    """

    def __init__(self, load: LoadJob, model: Model, *, spread: float, delay_ms: float, seed: int) -> None:
        super().__init__([], model.engine, model, fast_forward=False)
        self._hasher = BlockHasher(KEY, block_size=model.engine.block_size, model=load.model)
        self._random, self._spread, self._delay_ms = random.Random(seed), spread, delay_ms
        self._sends: list[Send] = []
        self._outputs: list[list[int]] = []
        self._roots = iter(load.open(UNSHARDED).plan())
        for send in islice(self._roots, load.config.parallel if not load.config.open_loop else None):
            self._schedule(send, 0.0)

    def _schedule(self, send: Send, now_ms: float) -> None:
        """Schedule the arrival of a request at its due time."""
        request = send.build()
        prompt: list[int] = msgspec.json.decode(request.body)["prompt"]
        output = [self._random.randrange(1000, 90_000) for _ in range(request.max_tokens)]
        hashes = self._hasher.hash_blocks([*prompt, *output[:-1]])
        prompt_blocks = len(prompt) // self._hasher.block_size
        record = Record(
            request_id=request.request_id,
            session_id=request.session_id,
            parent_id=request.parent_id,
            turn=request.turn,
            stream=True,
            max_tokens=request.max_tokens,
            prompt_tokens=len(prompt),
            block_hashes=hashes[:prompt_blocks],
            output_block_hashes=hashes[prompt_blocks:],
        )
        due_ms = now_ms + (send.due_ms or 0.0)
        arrival = Arrival(record, "runs", len(prompt), len(output), [int(block_hash) for block_hash in hashes], due_ms)
        heapq.heappush(self._arrivals, (due_ms, len(self._runs)))
        self._runs.append(RequestRun(arrival, due_ms))
        self._sends.append(send)
        self._outputs.append(output)

    def _work_ms(self, position: int) -> float:
        return reception_ms(self._costs, self._runs[position].arrival.prompt_tokens)

    def _advance(self, row: list[float]) -> None:
        start_ms = self.now_ms
        super()._advance(row)
        if self._spread:
            duration_ms = (self.now_ms - start_ms) * self._random.lognormvariate(0.0, self._spread)
            self.now_ms = self.timeline.ends_ms[-1] = start_ms + duration_ms
            self.timeline.delivered_ms[-1] = max([self.now_ms, *self.timeline.delivered_ms[-2:-1]])

    def _end(self, position: int, outcome: str) -> None:
        super()._end(position, outcome)
        request_run, send = self._runs[position], self._sends[position]
        if request_run.ttft_ms is not None and request_run.e2e_ms is not None:
            late_ms = self._random.uniform(0.0, self._delay_ms)
            request_run.ttft_ms, request_run.e2e_ms = request_run.ttft_ms + late_ms, request_run.e2e_ms + late_ms
        end_ms = request_run.arrival_ms + (request_run.e2e_ms or 0.0)
        response = Response(request_run.arrival.record, end_ms, self._outputs[position], None, "")
        following = send.then(response)
        if not following and send.due_ms is None:  # its slot is free
            following = list(islice(self._roots, 1))
        for each in following:
            self._schedule(each, end_ms)
        send.describe(response)


def capture(config: LoadConfig, model: Model, *, spread: float = 0.0, delay_ms: float = 0.0) -> list[Record]:
    """What a tap before an engine of this model records of the load."""
    job = LoadJob(config=config, model="m", load_id="l", key=KEY, block_size=16)
    engine: Any = PlannedEngine(job, model, spread=spread, delay_ms=delay_ms, seed=config.seed)
    return predicted_records(engine.run())


def write(path: Path, records: list[Record], model: Model) -> Path:
    """The capture as a file, with the engine metadata of this model."""
    meta = Meta(source="tap", block_size=model.engine.block_size, engine=engine_of(model))
    with TraceWriter(path, meta) as writer:
        for record in records:
            writer.write(record)
    return path
