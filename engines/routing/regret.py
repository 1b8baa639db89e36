"""Regret of routing: TTFT lost against an oracle that knows every engine as it is, and the reason for it.

The oracle is greedy: it sees the true wait and the true cache of each engine when a request arrives, and takes the
least TTFT predicted from them. It knows nothing of later requests, so a policy may lose now and win by it later.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

Reason = Literal["none", "queue met", "adapter loaded", "session moved", "prefix spread", "index wrong"]
"""``queue met``: waited where another engine was free. ``adapter loaded``: another engine had it resident.

Prefill that another engine need not have done is ``session moved``: the session's turn before ran elsewhere;
``index wrong``: the router took more blocks for cached there than were; else ``prefix spread``: engines hold copies
of the prefix, and this was another one."""
EVEN_MS: Final = 1e-6
"""Regret below it is none."""


class EngineTruth(msgspec.Struct, frozen=True, gc=False):
    """An engine as it is when a request arrives: parts of the TTFT that the request would have there."""

    wait_ms: float
    """Until its prefill begins: steps and prefills before it; free blocks and places in the batch do not count."""
    prefill_ms: float
    """Prefill of the tokens that are truly not cached, and the API server's time."""
    cached_tokens: int
    """Leading prompt tokens truly cached."""
    adapter_ms: float = 0.0
    """Load of its LoRA adapter; 0: resident."""

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.prefill_ms + self.adapter_ms


class Regret(msgspec.Struct, frozen=True, gc=False):
    """Regret of one choice. The three parts are differences to the oracle's engine and add up to ``regret_ms``."""

    number: int
    place: int
    """Engine that the policy chose."""
    oracle_place: int
    regret_ms: float
    wait_ms: float
    prefill_ms: float
    adapter_ms: float
    forgone_tokens: int
    """Prompt tokens cached on the engine with most of them, and not on the chosen one."""
    reason: Reason


def regret_of(
    number: int, place: int, truths: Sequence[EngineTruth], *, believed_tokens: float = 0.0, home: int | None = None
) -> Regret:
    """Return the regret of sending request ``number`` to ``place``; of equal engines the chosen one is the oracle's.

    ``believed_tokens``: prompt tokens cached there by the router's knowledge. ``home``: engine of the session's turn
    before; None: its first turn, or no session.
    """
    chosen = truths[place]
    ttfts = [truth.ttft_ms for truth in truths]
    least = min(ttfts)
    oracle_place = place if ttfts[place] - least < EVEN_MS else ttfts.index(least)
    oracle = truths[oracle_place]
    parts = {
        "wait": chosen.wait_ms - oracle.wait_ms,
        "prefill": chosen.prefill_ms - oracle.prefill_ms,
        "adapter": chosen.adapter_ms - oracle.adapter_ms,
    }
    reason: Reason = "none"
    if oracle_place != place:
        worst = max(parts, key=parts.__getitem__)
        if worst == "wait":
            reason = "queue met"
        elif worst == "adapter":
            reason = "adapter loaded"
        elif home is not None and home != place:
            reason = "session moved"
        else:
            reason = "index wrong" if believed_tokens > chosen.cached_tokens else "prefix spread"
    return Regret(
        number=number,
        place=place,
        oracle_place=oracle_place,
        regret_ms=ttfts[place] - ttfts[oracle_place],
        wait_ms=parts["wait"],
        prefill_ms=parts["prefill"],
        adapter_ms=parts["adapter"],
        forgone_tokens=max(truth.cached_tokens for truth in truths) - chosen.cached_tokens,
        reason=reason,
    )


class RegretAccount:
    """Sums over the choices of one run: regret by reason, hits forgone, engines that each prefix was sent to."""

    def __init__(self) -> None:
        self.regrets_ms: list[float] = []
        """In the order of the requests."""
        self.requests: Counter[str] = Counter()
        self.lost_ms: defaultdict[str, float] = defaultdict(float)
        self.forgone_tokens = 0
        self._engines_of: dict[int, int] = {}
        """Engines that requests with a first block went to, as bits."""
        self._uses: Counter[int] = Counter()

    def add(self, regret: Regret, blocks: Sequence[int]) -> None:
        self.regrets_ms.append(regret.regret_ms)
        self.requests[regret.reason] += 1
        self.lost_ms[regret.reason] += regret.regret_ms
        self.forgone_tokens += regret.forgone_tokens
        if blocks:
            self._engines_of[blocks[0]] = self._engines_of.get(blocks[0], 0) | 1 << regret.place
            self._uses[blocks[0]] += 1

    @property
    def engines_per_prefix(self) -> float | None:
        """Return the mean number of engines that a first block was sent to, of those sent more than once."""
        spread = [self._engines_of[key].bit_count() for key, uses in self._uses.items() if uses > 1]
        return sum(spread) / len(spread) if spread else None
