"""What a request is to the engine: its model checked, its answer drawn, its blocks hashed."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sim.answer import AnswerLimits, draw_answer
from sim.openai import ApiError, GenerationFields
from sim.realtime import Generation, RealTimeEngine
from sim.request import Request
from sim.vocabulary import Vocabulary
from tracefile import BlockHasher, HashKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What every endpoint shares."""

    engine: RealTimeEngine
    vocabulary: Vocabulary
    model_name: str
    max_model_len: int
    version: str
    seed: int
    median_answer_tokens: float
    hash_key: HashKey
    """Of this process alone: block keys never leave it."""

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless it is the served model, or none was named."""
        if name is not None and name != self.model_name:
            raise ApiError(f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model")

    def plan(
        self,
        fields: GenerationFields,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        on_progress: Callable[[], None],
    ) -> list[Generation]:
        """A generation for each choice of each prompt, nothing submitted yet. Raises ApiError for what cannot be."""
        choices = fields.n or 1
        if choices < 1 or (max_tokens is not None and max_tokens < 1):
            raise ApiError(f"n and max_tokens must be at least 1, got {fields.n} and {max_tokens}")
        if max_tokens is not None and (fields.min_tokens or 0) > max_tokens:
            raise ApiError(f"min_tokens ({fields.min_tokens}) must not exceed max_tokens ({max_tokens})")
        planned = []
        for prompt in prompts:
            limits = self._limits(fields, len(prompt), max_tokens)
            planned += [self._generation(fields, prompt, limits, choice, on_progress) for choice in range(choices)]
        return planned

    def _limits(self, fields: GenerationFields, prompt_tokens: int, max_tokens: int | None) -> AnswerLimits:
        room = self.max_model_len - prompt_tokens
        if room < 1:
            raise ApiError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt has "
                f"{prompt_tokens} tokens, which leaves no room for an answer.",
                param="prompt",
            )
        return AnswerLimits(
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            min_tokens=fields.min_tokens or 0,
            ignore_eos=bool(fields.ignore_eos),
            median_tokens=self.median_answer_tokens,
        )

    def _generation(
        self,
        fields: GenerationFields,
        prompt: list[int],
        limits: AnswerLimits,
        choice: int,
        on_progress: Callable[[], None],
    ) -> Generation:
        prompt_ids = np.array(prompt, dtype="<u4")
        seed = self.seed if fields.seed is None else self.seed ^ (fields.seed + 1)
        answer = draw_answer(prompt_ids.tobytes(), self.vocabulary, limits, seed, choice)
        # The last token's KV is never computed, so it fills no block.
        computed = np.concatenate([prompt_ids, np.array(answer.token_ids[:-1], dtype="<u4")])
        hasher = BlockHasher(
            self.hash_key, block_size=self.engine.scheduler.config.block_size, cache_salt=fields.cache_salt
        )
        request = Request(
            request_id=secrets.token_hex(8),
            prompt_tokens=len(prompt),
            output_tokens=len(answer.token_ids),
            hashes=[int(key) for key in hasher.hash_blocks(computed)],
            max_tokens=limits.max_tokens,
        )
        return Generation(request, answer, on_progress)
