"""Prediction of a request's TTFT on an engine as a router sees it, the policy of the earliest first token, and regret.

Regret is TTFT lost against an oracle. The oracle is greedy: it sees the true wait and the true cache of each engine
when a request arrives, and takes the least TTFT predicted from them. It knows nothing of later requests, so a policy
may lose now and win by it later.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Final, Literal

import msgspec

from engines.routing.load import least_costly
from engines.routing.records import Policy, RoutedEngine, RoutedRequest, RoutingCosts
from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError


def routing_costs(parameters: Mapping[str, float], step_tokens: float) -> RoutingCosts:
    """Return a router's numbers of a latency model: values by their names in model.json, others are left out."""
    known = {name: parameters.get(name, 0.0) for name in RoutingCosts.__struct_fields__ if name != "step_tokens"}
    return RoutingCosts(**known, step_tokens=step_tokens)


def at_speed(costs: RoutingCosts, speed: float) -> RoutingCosts:
    """Return the numbers of an engine that is ``speed`` times as fast."""
    times = {name: getattr(costs, name) / speed for name in RoutingCosts.__struct_fields__ if name != "step_tokens"}
    return RoutingCosts(**times, step_tokens=costs.step_tokens)


class _Parameter(msgspec.Struct):
    value: float


class _Engine(msgspec.Struct):
    max_num_batched_tokens: int


class _ModelFile(msgspec.Struct):
    """Part of a model.json that a router uses."""

    parameters: dict[str, _Parameter]
    engine: _Engine


def read_costs(path: str | os.PathLike[str]) -> RoutingCosts:
    """Read a router's numbers from a model.json. Raises InputError naming the file and the field."""
    try:
        model = msgspec.json.decode(Path(path).read_bytes(), type=_ModelFile)
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: {error.strerror}; expected a model.json") from None
    except NOT_JSON as error:
        raise InputError(f"{os.fspath(path)}: {error}; expected a model.json") from None
    values = {name: parameter.value for name, parameter in model.parameters.items()}
    return routing_costs(values, model.engine.max_num_batched_tokens)


def prefill_ms(costs: RoutingCosts, tokens: float, depth: float) -> float:
    """Return the time to compute ``tokens`` of a prompt after ``depth`` tokens of KV, without the steps' own cost."""
    return tokens * (costs.per_prefill_token_ms + costs.per_attention_token2_ms * (depth + tokens / 2))


def predicted_ttfts_ms(
    request: RoutedRequest, engines: Sequence[RoutedEngine], adapter_load_tokens: float = 0.0
) -> list[float]:
    """Return the TTFT that each engine's costs predict for a request sent to it now.

    The API server's time, then the prefill outstanding there and that of the prompt's uncached tokens, in steps that
    decode the other requests, too. The router does not see how far a prefill has come: an outstanding one counts
    whole until its first token. Its attention is that of a prompt of mean length. ``adapter_load_tokens``: prefill
    tokens that loading a missing LoRA adapter takes as long as.
    """
    prompt_tokens, block_tokens = request.prompt_tokens, request.block_tokens
    found = [
        predicted_ttft_ms(engine.costs, engine, prompt_tokens, max(1.0, prompt_tokens - engine.overlap * block_tokens))
        for engine in engines
    ]
    if request.adapter is not None:
        for place, engine in enumerate(engines):
            if request.adapter not in engine.adapters:
                found[place] += adapter_load_tokens * engine.costs.per_prefill_token_ms
    return found


def predicted_ttft_ms(costs: RoutingCosts, engine: RoutedEngine, prompt_tokens: int, uncached: float) -> float:
    """Return the TTFT of a prompt on an engine with these costs, its adapter resident; the simulator compiles it."""
    outstanding, requests = engine.prefill_tokens, engine.requests
    token_ms, token2_ms = costs.per_prefill_token_ms, costs.per_attention_token2_ms
    ms = costs.frontend_base_ms + prompt_tokens * (
        costs.frontend_ms_per_prompt_token + costs.delivery_ms_per_prompt_token
    )
    ms += uncached * (token_ms + token2_ms * (prompt_tokens - uncached / 2))
    step_ms = costs.t0_ms + costs.prefill_step_ms
    if requests:
        ms += outstanding * (token_ms + token2_ms * engine.held_tokens / requests / 2)
        step_ms += costs.per_decode_ms * requests + costs.per_kv_token_ms * engine.held_tokens
    return ms + ceil((outstanding + uncached) / costs.step_tokens) * step_ms


def earliest_first_token(adapter_load_tokens: float) -> Policy:
    """Return the policy of the least predicted TTFT; of equals, the fewest requests."""

    def choose(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        return least_costly(predicted_ttfts_ms(request, engines, adapter_load_tokens), request, engines)

    return choose


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
