"""Terms of the latency model: durations of scheduler steps and of API server work are linear in their counts.

    step_ms          = sum over the terms of a step of cost × count
    entry            = arrival + frontend_base_ms + frontend_ms_per_prompt_token × prompt tokens
    first token      = end of its step + delivery_ms_per_prompt_token × prompt tokens

A row holds a count per term, in the order of ``TERMS``. Parameters in model.json and columns of the fit follow from
``TERMS``. A new term is a ``Term`` here, and in ``sim.latency.stepcost`` its index in the row and the line that counts
it. docs/model.md explains each term.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StepRow = Sequence[float]
"""Term counts of a step, then on a shared core the counts of received requests."""

FrontendPlacement = Literal["parallel", "serial", "shared_core"]
"""``parallel``: the API server works on all requests at once. ``serial``: on one request at a time, as an event loop
does. ``shared_core``: serial on the engine's core, so that both run at half speed while both have work."""


@dataclass(frozen=True, slots=True)
class Term:
    """Cost of a kind of work, such as prefill tokens: a parameter of the latency model, a column of the fit."""

    name: str
    """Name in model.json; its unit is ``unit``."""
    unit: str
    counts: str
    """Description of the counted quantity."""
    work: Literal["step", "prefill", "decode", "reception", "delivery"]
    """Kind of work. ``step``: independent of the step's batch."""
    default: bool = False
    """True: in every fit. Other terms enter if they improve a fit, or on request."""
    capture: str = "a load in which its count varies on its own"
    """Load that identifies this term in a fit (see ``loadgen``)."""


STEP_TERMS = (
    Term("t0_ms", "ms/step", "steps", "step", default=True, capture="streamed outputs of a few tokens and more"),
    Term(
        "per_prefill_token_ms",
        "ms/token",
        "prompt tokens computed",
        "prefill",
        default=True,
        capture="isolated uncached prompts of several sizes up to the step's token budget",
    ),
    Term(
        "per_attention_token2_ms",
        "ms/token²",
        "sum over chunks of chunk × (depth + chunk / 2)",
        "prefill",
        default=True,
        capture="uncached prompts several times longer than the step's token budget",
    ),
    Term(
        "per_decode_ms",
        "ms/request",
        "decoding requests",
        "decode",
        default=True,
        capture="outputs generated alone and several at once",
    ),
    Term(
        "per_kv_token_ms",
        "ms/token",
        "KV tokens of the decoding requests, first read in the step",
        "decode",
        default=True,
        capture="outputs generated after short and after very long prompts",
    ),
    Term(
        "per_repeated_kv_token_ms",
        "ms/token",
        "KV tokens of the decoding requests, read again in the step for another request",
        "decode",
        default=True,
        capture="outputs generated at once after prompts that share a long prefix",
    ),
    Term("per_prefill_chunk_ms", "ms/chunk", "prefill chunks", "prefill"),
    Term("per_prefill_depth_ms", "ms/token", "KV tokens before the prefill chunks", "prefill"),
    Term("per_chunk_square_ms", "ms/token²", "sum over chunks of chunk² / 2", "prefill"),
    Term("prefill_step_ms", "ms/step", "steps with a prefill chunk in them", "step"),
    Term(
        "rested_step_ms",
        "ms/step",
        "steps after idle time of the engine, weighted by its length",
        "step",
        capture="short prompts after pauses of up to 5 s",
    ),
    Term(
        "per_rested_depth_ms",
        "ms/token",
        "KV tokens before the prefill chunks of a step after idle time, weighted by its length",
        "prefill",
        capture="long prompts sent again after pauses of up to 5 s",
    ),
)
RECEPTION_TERMS = (
    Term("frontend_base_ms", "ms/request", "requests", "reception", default=True, capture="isolated short prompts"),
    Term(
        "frontend_ms_per_prompt_token",
        "ms/token",
        "prompt tokens received",
        "reception",
        default=True,
        capture="long prompts sent again, so that most of them is cached",
    ),
)
DELIVERY_TERMS = (
    Term(
        "delivery_ms_per_prompt_token",
        "ms/token",
        "prompt tokens of the requests whose first token is sent",
        "delivery",
        capture="long prompts sent again while others are decoding",
    ),
)
TERMS = (*STEP_TERMS, *RECEPTION_TERMS, *DELIVERY_TERMS)
DEFAULT_TERMS = tuple(term.name for term in TERMS if term.default)
EXTRA_TERMS = tuple(term.name for term in TERMS if not term.default)


def column(name: str) -> int:
    """Return the index of a term in ``TERMS`` and in every row."""
    return [term.name for term in TERMS].index(name)
