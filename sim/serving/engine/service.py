"""Requests prepared for the engine: model checked, output drawn, blocks hashed."""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from engines.routing import Route, RoutedRequest, make_router
from engines.routing.adapters import AdapterSlots
from engines.routing.costs import routing_costs
from sim.latency.modelfile import Model
from sim.serving.engine.faults import Faults
from sim.serving.engine.realtime import RealTimeEngine
from sim.serving.requests.errors import ApiError
from sim.serving.requests.fields import Asked, GenerationFields
from sim.serving.requests.output import Generation, OutputLimits, draw_output
from sim.serving.requests.vocabulary import Spelling, Vocabulary
from sim.vllm.request import Request
from tracefile import BlockHasher, HashKey


class Caches:
    """Complete knowledge of the engines' caches: the blocks that they hold now."""

    def __init__(self, engines: Sequence[RealTimeEngine]) -> None:
        self._engines = engines

    def overlaps(self, blocks: Sequence[int], now_s: float) -> list[int]:
        return [len(engine.scheduler.pool.lookup(list(blocks), len(blocks))) for engine in self._engines]

    def sent(self, place: int, blocks: Sequence[int], now_s: float) -> None:
        """Nothing to learn: the engine's own pool is asked."""

    def forget(self, place: int) -> None:
        """Nothing to forget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """LoRA adapters that the engines serve."""

    names: tuple[str, ...] = ()
    load_ms: float = 0.0
    """Delay of a request whose adapter is not resident."""
    slots: int = 1
    """Adapters resident on an engine at once."""


class Fleet:
    """Engines behind one router; each draws noise of its own from ``noise_seed``."""

    def __init__(
        self,
        model: Model,
        count: int,
        route: Route,
        *,
        speed: float | None,
        noise_seed: int | None,
        adapters: Adapters = Adapters(),
    ) -> None:
        seeds = [None if noise_seed is None else noise_seed + place for place in range(count)]
        self.engines = [RealTimeEngine(model, speed=speed, noise_seed=seed) for seed in seeds]
        self.model = model
        self.router = make_router(
            route,
            [str(place) for place in range(count)],
            complete=Caches(self.engines),
            capacity_blocks=model.engine.usable_blocks,
            costs=[routing_costs(model.cost_by_name, model.engine.max_num_batched_tokens)] * count,
            adapter_slots=adapters.slots,
        )
        self.adapters = adapters
        self._resident = [AdapterSlots(adapters.slots) for _ in range(count)]
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

    def adapter_of(self, fields: GenerationFields) -> str | None:
        """Return the adapter that the model's name selects."""
        return fields.model if fields.model in self.adapters.names else None

    def load(self, place: int, fields: GenerationFields) -> float:
        """Use a request's adapter on its engine; return the delay by loading it, ms."""
        adapter = self.adapter_of(fields)
        return 0.0 if adapter is None or self._resident[place].use(adapter) else self.adapters.load_ms

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
            blocks=first.hashes[: first.prompt_tokens // self.block_size],
            block_tokens=self.block_size,
            prompt_tokens=first.prompt_tokens,
            output_tokens=first.max_tokens,
            adapter=self.adapter_of(fields),
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


MOST_REQUEST_TOKENS = 1 << 22
"""Bound for a request's prompts and outputs, each choice with its prompt: 256 choices of 16,384 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """State shared by all endpoints."""

    fleet: Fleet
    vocabulary: Vocabulary
    spelling: Spelling
    model_name: str
    max_model_len: int
    version: str
    seed: int
    median_output_tokens: float
    faults: Faults
    hash_key: HashKey
    """Of this process alone: block keys never leave it."""
    sampled: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of outputs without a seed of their own."""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless it is the served model or an adapter of it, or none was named."""
        if name is not None and name != self.model_name and name not in self.fleet.adapters.names:
            raise ApiError(f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model")

    def plan(self, asked: Asked, on_progress: Callable[[Generation], None]) -> list[Generation]:
        """A generation for each choice of each prompt, nothing submitted yet. Raises ApiError for what cannot be."""
        fields, max_tokens = asked.fields, asked.max_tokens
        choices = 1 if fields.n is None else fields.n
        if choices < 1 or (max_tokens is not None and max_tokens < 1):
            raise ApiError(f"n and max_tokens must be at least 1, got {fields.n} and {max_tokens}")
        if max_tokens is not None and (fields.min_tokens or 0) > max_tokens:
            raise ApiError(f"min_tokens ({fields.min_tokens}) must not exceed max_tokens ({max_tokens})")
        if fields.stream_options is not None and not fields.stream:
            raise ApiError("stream_options: only with stream = true", param="stream_options")
        prompts = [(prompt, self._limits(fields, len(prompt), max_tokens)) for prompt in asked.prompts]
        tokens = choices * sum(len(prompt) + limits.max_tokens for prompt, limits in prompts)
        if tokens > MOST_REQUEST_TOKENS:
            raise ApiError(
                f"n, prompts and max_tokens ask for up to {tokens} tokens; expected at most {MOST_REQUEST_TOKENS}",
                param="n",
            )
        planned = []
        for prompt, limits in prompts:
            prompt_ids = np.array(prompt, dtype="<u4")
            planned += [self._generation(asked, prompt_ids, limits, choice, on_progress) for choice in range(choices)]
        for place, generation in enumerate(planned):
            generation.place = place
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

    def _generation(
        self,
        asked: Asked,
        prompt_ids: np.ndarray[tuple[int], np.dtype[np.uint32]],
        limits: OutputLimits,
        choice: int,
        on_progress: Callable[[Generation], None],
    ) -> Generation:
        fields = asked.fields
        prompt, seed = prompt_ids.tobytes(), self._seed(fields)
        output = draw_output(prompt, self.vocabulary, limits, seed, choice, stops=fields.stops())
        # The last token's KV is never computed, so it fills no block.
        computed = np.concatenate([prompt_ids, np.array(output.token_ids[:-1], dtype="<u4")])
        hasher = BlockHasher(
            self.hash_key,
            block_size=self.fleet.block_size,
            lora=self.fleet.adapter_of(fields),
            cache_salt=fields.cache_salt,
        )
        request = Request(
            request_id=secrets.token_hex(8),
            prompt_tokens=len(prompt_ids),
            output_tokens=len(output.token_ids),
            hashes=[int(key) for key in hasher.hash_blocks(computed)],
            max_tokens=limits.max_tokens,
            priority=fields.priority or 0,
            prompt_logprobs=asked.prompt_logprobs is not None,
        )
        return Generation(request, output, on_progress)

    def _seed(self, fields: GenerationFields) -> int:
        """Seed of an output: with a temperature above 0 and no seed another one every time."""
        if fields.seed is not None:
            return self.seed ^ (fields.seed + 1)
        return self.seed ^ (next(self.sampled) << 32) if fields.temperature else self.seed
