"""What a step's duration is linear in: the terms, as data, and how a step is counted in them.

A step is a row with one number per term; its duration is the row times the model's parameters. The five terms of the
default model come first. The others are for engines whose steps those five do not describe: a fit takes them in when
they help or it is told to, and a model without them costs nothing. So it is with the front end's.
"""

from dataclasses import dataclass

from sim.vllm.scheduler import Step

StepRow = tuple[float, ...]
"""One step's count of every term, in the order of ``STEP_TERMS``."""


@dataclass(frozen=True, slots=True)
class Term:
    """One thing that costs time: a column of the regression, a parameter of the model."""

    name: str
    """The parameter's name in model.json."""
    unit: str
    """The parameter's unit."""
    counts: str
    """What the row counts."""


STEP_TERMS = (
    Term("t0_ms", "ms/step", "steps"),
    Term("per_prefill_token_ms", "ms/token", "prompt tokens computed"),
    Term("per_attention_token2_ms", "ms/token²", "sum over chunks of chunk × (depth + chunk / 2)"),
    Term("per_decode_ms", "ms/request", "decoding requests"),
    Term("per_kv_token_ms", "ms/token", "KV tokens of the decoding requests"),
    Term("per_prefill_chunk_ms", "ms/chunk", "prefill chunks"),
    Term("per_prefill_depth_ms", "ms/token", "KV tokens before the prefill chunks"),
    Term("per_chunk_square_ms", "ms/token²", "sum over chunks of chunk² / 2"),
    Term("prefill_step_ms", "ms/step", "steps with a prefill chunk in them"),
)
FRONTEND_TERMS = (
    Term("f0_ms", "ms/request", "requests"),
    Term("f1_ms_per_prompt_token", "ms/token", "prompt tokens received"),
    Term("delivery_ms_per_prompt_token", "ms/token", "prompt tokens of the requests whose first token is sent"),
)
TERMS = (*STEP_TERMS, *FRONTEND_TERMS)
DEFAULT_TERMS = tuple(term.name for term in (*STEP_TERMS[:5], *FRONTEND_TERMS[:2]))
EXTRA_STEP_TERMS = tuple(term.name for term in STEP_TERMS[5:])
EXTRA_TERMS = tuple(term.name for term in TERMS if term.name not in DEFAULT_TERMS)


def step_row(step: Step) -> StepRow:
    """Count ``step`` in every term. One token beyond the prompt is a decode; any other share is a prefill chunk."""
    chunks = tokens = depths = requests = kv_tokens = 0
    attention = square = 0.0
    for request, num_tokens, depth, _ in step.scheduled:
        if num_tokens == 1 and depth >= request.prompt_tokens:
            requests += 1
            kv_tokens += depth
        else:
            half_square = num_tokens * num_tokens / 2
            chunks += 1
            tokens += num_tokens
            depths += depth
            square += half_square
            attention += num_tokens * depth + half_square
    return (1.0, tokens, attention, requests, kv_tokens, chunks, depths, square, 1.0 if chunks else 0.0)


def decode_row(requests: int, kv_tokens: int) -> StepRow:
    """The row of a step in which ``requests`` decode on ``kv_tokens`` and nobody prefills."""
    return (1.0, 0, 0.0, requests, kv_tokens, 0, 0, 0.0, 0.0)
