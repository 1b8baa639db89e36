"""Request in the scheduler: tokens and progress."""

from dataclasses import dataclass, field
from typing import Literal

State = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False)
class Request:
    """Request in the scheduler; compared by identity, because a scheduler holds each once.

    ``hashes`` is the chain over prompt and output at the engine's block size, long enough for every block that gets
    full: ``(prompt_tokens + output_tokens - 1) // block_size`` keys. A block whose content is unknown or private has a
    key of its own (see ``sim.workload.chain``).
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens that it will generate, at least 1."""
    hashes: list[int]
    arrival_ms: float = 0.0
    index: int = 0
    """Place in the workload, for the caller's records."""
    max_tokens: int = 0
    """Where generation would stop at the latest; 0: at ``output_tokens``. An asynchronous engine that is not sure of
    the end schedules one step more, whose token is thrown away."""

    prompt_logprobs: bool = False
    """True: it is never looked up in the prefix cache, as every prompt token must be computed; its blocks are cached as
    any others."""

    state: State = "waiting"
    num_tokens: int = field(init=False)
    """Tokens known so far: the prompt and the generated tokens."""
    num_computed: int = 0
    """Tokens whose KV is in blocks, steps in flight included; 0 again after a preemption."""
    blocks: list[int] = field(default_factory=list)
    """Block ids held, in the order of the tokens they hold."""
    allocated_tokens: int = 0
    """Tokens that the blocks can hold."""
    num_hashed: int = 0
    """Number of leading blocks in the prefix cache under this request's keys."""
    shared_tokens: int = 0
    """With several KV groups: end of the longest hit that one of them had, if all together have less; 0: none."""
    next_full: int = 0
    """Tokens that fill the block after the cached blocks: until then no further block can be hit."""
    placeholders: int = 0
    """Tokens that steps in flight will sample (vLLM's ``num_output_placeholders``)."""
    steps_in_flight: int = 0
    tokens_in_flight: int = 0
    """Tokens that the steps compute."""
    stale_steps: int = 0
    """Those of ``steps_in_flight`` that were scheduled before the last preemption: their tokens still count."""
    cached_tokens: int | None = None
    """Prompt tokens hit in the prefix cache at the first admission, as vLLM reports; None: not admitted yet."""
    preemptions: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"request {self.request_id}: needs a prompt and an output of at least one token")
        self.max_tokens = max(self.max_tokens, self.output_tokens)
        self.num_tokens = self.prompt_tokens

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_tokens

    @property
    def last_token(self) -> int:
        """Prompt plus output tokens; the KV of the last token is never computed."""
        return self.prompt_tokens + self.output_tokens
