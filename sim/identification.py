"""Which parameters the captures pin down, which they do not, and which capture would."""

from dataclasses import dataclass

import numpy as np

from sim.features import TERMS
from sim.observations import Observations
from sim.timeline import Floats
from tracefile.errors import InputError

LEAST_INTERVALS = 20
_LOOSE = 0.05
"""A parameter whose interval moves the most affected tenth of predictions by more than this, and is wider than its
value, is not identified."""

CAPTURE_FOR = {
    "t0_ms": "streamed answers of a few tokens and more",
    "per_prefill_token_ms": "isolated uncached prompts of several sizes up to the step's token budget",
    "per_attention_token2_ms": "uncached prompts several times longer than the step's token budget",
    "per_decode_ms": "answers generated alone and several at once",
    "per_kv_token_ms": "answers generated after short and after very long prompts",
    "f0_ms": "isolated short prompts",
    "f1_ms_per_prompt_token": "long prompts sent again, so that most of them is cached",
}
"""What to send (see ``loadgen``) to tell a parameter from the others."""


@dataclass(frozen=True, slots=True)
class Unidentified:
    """A parameter that the captures leave open."""

    name: str
    why: str
    capture: str
    """What to capture to identify it."""


def require_enough(uncached_tokens: Floats, gaps: int) -> None:
    """Raise InputError, saying what to capture, where no fit could mean anything.

    ``uncached_tokens``: of each request with a TTFT; ``gaps``: how many were seen.
    """
    ttfts = len(uncached_tokens)
    if ttfts < LEAST_INTERVALS:
        raise InputError(
            f"only {ttfts} requests have a TTFT and a prompt length; expected at least {LEAST_INTERVALS}: capture "
            "streamed requests, such as isolated prompts of 64 to 10,000 tokens"
        )
    if gaps < LEAST_INTERVALS:
        raise InputError(
            f"only {gaps} gaps between tokens; expected at least {LEAST_INTERVALS}: capture streamed answers of 8 "
            "tokens and more"
        )
    low, high = np.quantile(uncached_tokens, [0.05, 0.95])
    if high < 2.0 * max(low, 1.0):
        raise InputError(
            f"uncached prompts are all of about one size ({low:.0f} to {high:.0f} tokens), so that a step's constant "
            f"cannot be told from its cost per token: capture {CAPTURE_FOR['per_prefill_token_ms']}"
        )


def find_unidentified(seen: Observations, free: list[int], parameters: Floats, draws: Floats) -> list[Unidentified]:
    """Those of ``free`` that hardly enter, or whose bootstrap ``draws`` (rounds, terms) are all over the place."""
    predicted = np.maximum(seen.counts @ parameters, 1e-6)
    found = []
    for column in free:
        name = TERMS[column].name
        reach = float(np.quantile(seen.counts[:, column] / predicted, 0.9))
        if not seen.counts[:, column].any():
            why = "nothing in the captures depends on it"
        else:
            reach = max(reach, _reach_of_ttft(seen, column, predicted))
            low, high = np.quantile(draws[:, column], [0.025, 0.975]) if len(draws) else (0.0, 0.0)
            width = float(high - low)
            if width * reach <= _LOOSE or width <= parameters[column]:
                continue
            why = f"the captures allow anything from {low:.3g} to {high:.3g}"
        capture = CAPTURE_FOR.get(name, "a load in which what it counts varies on its own")
        found.append(Unidentified(name, why, capture))
    return found


def _reach_of_ttft(seen: Observations, column: int, predicted: Floats) -> float:
    rows = seen.is_prefill
    return float(np.quantile(seen.counts[rows, column] / predicted[rows], 0.9)) if rows.any() else 0.0
