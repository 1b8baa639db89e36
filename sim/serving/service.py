"""Requests prepared for the engines: model checked, output drawn, blocks hashed, engine chosen."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from engines.routing import Route, RoutedRequest, make_router
from engines.routing.costs import routing_costs
from measure.cache.vectors import array_of, integers
from sim.latency.modelfile import Model
from sim.serving.fields import ApiError, GenerationFields
from sim.serving.output import Generation, Output, OutputLimits, draw_output
from sim.serving.realtime import RealTimeEngine
from sim.serving.vocabulary import Vocabulary
from sim.vllm.request import ANY_HITS, Request
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.hashkey import HashKey


class Caches:
    """Complete knowledge of the engines' caches: the blocks that they hold now."""

    def __init__(self, engines: Sequence[RealTimeEngine]) -> None:
        self._engines = engines

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        return [engine.scheduler.cache.count_hits(integers(np.array(blocks, np.uint64))) for engine in self._engines]

    def sent(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """Nothing to learn: the engine's own pool is asked."""

    def forget(self, place: int) -> None:
        """Nothing to forget."""


class Fleet:
    """Engines behind one router; each draws noise of its own from ``noise_seed``."""

    def __init__(self, model: Model, count: int, route: Route, *, speed: float | None, noise_seed: int | None) -> None:
        seeds = [None if noise_seed is None else noise_seed + place for place in range(count)]
        self.engines = [RealTimeEngine(model, speed=speed, noise_seed=seed) for seed in seeds]
        self.model = model
        self.router = make_router(
            route,
            [str(place) for place in range(count)],
            complete=Caches(self.engines),
            capacity_blocks=model.engine.usable_blocks,
            costs=[routing_costs(model.cost_by_name, model.engine.max_num_batched_tokens)] * count,
        )
        self._requests = 0
        self._open: dict[int, int] = {}
        """Outputs not ended of each request sent."""
        if count > 1:
            for engine in self.engines:
                engine.on_first, engine.on_end = self._first_token, self._ended

    @property
    def block_size(self) -> int:
        return self.model.engine.block_size

    async def run(self) -> None:
        """Step for ever; cancel it to stop. Ends only by a fault."""
        async with asyncio.TaskGroup() as group:
            for engine in self.engines:
                group.create_task(engine.run())

    def route(self, session: str | None, fields: GenerationFields, generations: Sequence[Generation]) -> int:
        """Return the place of the engine for a request, the same for all its prompts and choices."""
        if len(self.engines) == 1:
            return 0
        for engine in self.engines:
            engine.settle()
        first, named = generations[0].request, session or fields.user or None
        request = RoutedRequest(
            number=self._requests,
            arrival_s=self._clock_s(),
            session=None if named is None else named.encode(),
            blocks=array_of(first.keys, np.uint64)[: first.prompt_tokens // self.block_size].tolist(),
            block_tokens=self.block_size,
            prompt_tokens=first.prompt_tokens,
            output_tokens=first.token_limit - first.prompt_tokens,
        )
        self._requests += 1
        place = self.router.choose(request)
        self.router.sent(request, place)
        self._open[request.number] = len(generations)
        for generation in generations:
            generation.routed = request.number
        return place

    def reset_prefix_cache(self) -> bool:
        done = [engine.reset_prefix_cache() for engine in self.engines]
        for place, emptied in enumerate(done):
            if emptied:
                self.router.lost_cache(place)
        return all(done)

    def abort_all(self) -> None:
        for engine in self.engines:
            engine.abort_all()

    def _first_token(self, generation: Generation) -> None:
        self.router.first_token(generation.routed)

    def _ended(self, generation: Generation) -> None:
        self._open[generation.routed] -= 1
        if not self._open[generation.routed]:
            del self._open[generation.routed]
            self.router.ended(generation.routed, self._clock_s())

    def _clock_s(self) -> float:
        return max(engine.clock_ms() for engine in self.engines) / 1e3


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A decoded request, independent of its API."""

    fields: GenerationFields
    prompts: list[list[int]]
    max_tokens: int | None
    """None: as many as fit."""

    @property
    def choices(self) -> int:
        """Outputs of each prompt."""
        return 1 if self.fields.n is None else self.fields.n


MOST_REQUEST_TOKENS = 1 << 22
"""Bound for a request's prompts and outputs, each choice with its prompt: 256 choices of 16,384 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """State shared by all endpoints."""

    fleet: Fleet
    vocabulary: Vocabulary
    model_name: str
    max_model_len: int
    version: str
    seed: int
    median_output_tokens: float
    hash_key: HashKey
    """Of this process alone: block keys never leave it."""
    sampled: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of outputs without a seed of their own."""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless it is the served model, or none was named."""
        if name is not None and name != self.model_name:
            raise ApiError(f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model")

    def plan(self, request: PlannedRequest, on_progress: Callable[[Generation], None]) -> list[Generation]:
        """Return a generation for each choice of each prompt, nothing submitted yet. Raises ApiError."""
        fields, max_tokens, choices = request.fields, request.max_tokens, request.choices
        self.check_model(fields.model)
        if choices < 1 or (max_tokens is not None and max_tokens < 1):
            raise ApiError(f"n and max_tokens must be at least 1, got {fields.n} and {max_tokens}")
        if max_tokens is not None and (fields.min_tokens or 0) > max_tokens:
            raise ApiError(f"min_tokens ({fields.min_tokens}) must not exceed max_tokens ({max_tokens})")
        if fields.stream_options is not None and not fields.stream:
            raise ApiError("stream_options: only with stream = true", param="stream_options")
        prompts = [(prompt, self._limits(fields, len(prompt), max_tokens)) for prompt in request.prompts]
        tokens = choices * sum(len(prompt) + limits.max_tokens for prompt, limits in prompts)
        if tokens > MOST_REQUEST_TOKENS:
            raise ApiError(
                f"n, prompts and max_tokens ask for up to {tokens} tokens; expected at most {MOST_REQUEST_TOKENS}",
                param="n",
            )
        planned: list[Generation] = []
        for prompt, limits in prompts:
            prompt_ids = np.array(prompt, dtype="<u4")
            for choice in range(choices):
                made, output = self._engine_request(fields, prompt_ids, limits, choice)
                planned.append(Generation(made, output, on_progress, len(planned)))
        return planned

    def _limits(self, fields: GenerationFields, prompt_tokens: int, max_tokens: int | None) -> OutputLimits:
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{prompt_tokens} tokens, which leaves no room for an output.",
                param="prompt",
            )
        return OutputLimits(
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            min_tokens=fields.min_tokens or 0,
            ignore_eos=bool(fields.ignore_eos),
            median_tokens=self.median_output_tokens,
        )

    def _engine_request(
        self,
        fields: GenerationFields,
        prompt_ids: np.ndarray[tuple[int], np.dtype[np.uint32]],
        limits: OutputLimits,
        choice: int,
    ) -> tuple[Request, Output]:
        output = draw_output(prompt_ids.tobytes(), self.vocabulary, limits, self._seed(fields), choice)
        # The last token's KV is never computed, so it fills no block.
        computed = np.concatenate([prompt_ids, np.array(output.token_ids[:-1], dtype="<u4")])
        hasher = BlockHasher(self.hash_key, block_size=self.fleet.block_size, cache_salt=fields.cache_salt)
        keys = integers(np.array(hasher.hash_blocks(computed), np.uint64))
        request = Request(
            secrets.token_hex(8),
            len(prompt_ids),
            len(output.token_ids),
            keys,
            num_keys=len(keys),
            token_limit=len(prompt_ids) + limits.max_tokens,
            hit_limit=ANY_HITS if fields.prompt_logprobs is None else 0,
        )
        return request, output

    def _seed(self, fields: GenerationFields) -> int:
        """Return the seed of an output: with a temperature above 0 and no seed another one every time."""
        if fields.seed is not None:
            return self.seed ^ (fields.seed + 1)
        return self.seed ^ (next(self.sampled) << 32) if fields.temperature else self.seed
