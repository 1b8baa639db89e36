"""``--route``: parser of a policy with settings, and construction of its router."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from engines.routing.costs import at_speed, routing_costs
from engines.routing.policies import POLICIES, PolicyKind, user_policy
from engines.routing.prefix import PrefixIndex
from engines.routing.records import TOKENS_ALONE, RoutingCosts
from engines.routing.router import Knowledge, Router
from tracefile.commandline.durations import duration
from tracefile.records.decoding import NOT_JSON
from tracefile.records.errors import InputError

CacheKnowledge = Literal["complete", "partial", "none"]
"""``complete``: the engines' prefix caches; ``partial``: the router's prefix index; ``none``: overlaps are 0."""
INDEX_BLOCKS = 65_536
"""Size of the prefix index per engine, in blocks, if the engine's KV cache size is unknown."""
SETTINGS = ("knowledge", "index-blocks", "lag", "model")
ROUTE_HELP = (
    f"policy: {', '.join(POLICIES)}, or FILE.py:FUNCTION; settings follow, as in prefix:lag=250ms (docs/fleet.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A policy of ``--route`` with its prefix index settings. Other processes parse ``text`` again."""

    text: str
    """Value of the flag."""
    kind: PolicyKind
    knowledge: CacheKnowledge = "partial"
    index_blocks: int | None = None
    """Size of the prefix index per engine. None: the engine's KV cache size, or ``INDEX_BLOCKS``."""
    lag_s: float = 0.0
    """Delay until a sent request's blocks are in the prefix index."""
    costs: RoutingCosts | None = None
    """Costs of the route's latency model. None: the costs of each engine."""


@cache
def parse_route(text: str) -> Route:
    """Parse ``NAME[:SETTING=VALUE]…`` or ``FILE.py:FUNCTION[:SETTING=VALUE]…``. Raises InputError."""
    name, *words = text.split(":")
    if name.endswith(".py"):
        kind = user_policy(name, words.pop(0) if words else "")
    elif name in POLICIES:
        kind = POLICIES[name]
    else:
        raise InputError(f"--route {text}: unknown policy; expected one of {', '.join(POLICIES)}, or FILE.py:FUNCTION")
    try:
        return Route(text=text, kind=kind, **dict(map(_setting, words)))
    except InputError as error:
        raise InputError(f"--route {text}: {error}") from None


def _setting(word: str) -> tuple[str, Any]:
    """Parse SETTING=VALUE into the field of ``Route`` and its value."""
    name, _, value = word.partition("=")
    if name == "knowledge" and value in get_args(CacheKnowledge):
        return name, value
    if name == "index-blocks" and value.isdecimal() and int(value):
        return "index_blocks", int(value)
    if name == "lag":
        try:
            return "lag_s", duration(value)
        except Exception as error:
            raise InputError(f"lag={error}") from None
    if name == "model":
        return "costs", read_costs(value)
    expected = {"knowledge": f"one of {', '.join(get_args(CacheKnowledge))}", "index-blocks": "a whole number above 0"}
    raise InputError(f"{word!r}; expected {expected.get(name, 'SETTING=VALUE, a setting of ' + ', '.join(SETTINGS))}")


class _Parameter(msgspec.Struct):
    value: float


class _Engine(msgspec.Struct):
    max_num_batched_tokens: int


class _ModelFile(msgspec.Struct):
    """Fields of a model.json that routing uses: latency parameters and token budget."""

    parameters: dict[str, _Parameter]
    engine: _Engine


def read_costs(path: str | os.PathLike[str]) -> RoutingCosts:
    """Read routing costs from a model.json. Raises InputError naming the file and the field."""
    try:
        model = msgspec.json.decode(Path(path).read_bytes(), type=_ModelFile)
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: {error.strerror}; expected a model.json") from None
    except NOT_JSON as error:
        raise InputError(f"{os.fspath(path)}: {error}; expected a model.json") from None
    values = {name: parameter.value for name, parameter in model.parameters.items()}
    return routing_costs(values, model.engine.max_num_batched_tokens)


def make_router(
    route: Route,
    names: Sequence[str],
    *,
    complete: Knowledge | None = None,
    capacity_blocks: int = 0,
    costs: Sequence[RoutingCosts] = (),
    speeds: Sequence[float] = (),
) -> Router:
    """Return a router over the named engines. ``complete``: the engines' prefix caches; None: not accessible.

    ``speeds``: relative speeds of the engines, applied to the costs of the route's model; empty: equal. Raises
    InputError if the route needs complete knowledge and ``complete`` is None.
    """
    knowledge: Knowledge | None = None
    if route.kind.uses_cache and route.knowledge == "partial":
        blocks = route.index_blocks or capacity_blocks or INDEX_BLOCKS
        knowledge = PrefixIndex(len(names), capacity_blocks=blocks, lag_s=route.lag_s)
    elif route.kind.uses_cache and route.knowledge == "complete":
        if complete is None:
            raise InputError(
                f"--route {route.text}: the engines' prefix caches are not accessible; expected knowledge=partial"
            )
        knowledge = complete
    if route.costs is not None or not costs:
        costs = [at_speed(route.costs or TOKENS_ALONE, speed) for speed in speeds or [1.0] * len(names)]
    return Router(names, route.kind.make(), knowledge=knowledge, capacity_blocks=capacity_blocks, costs=costs)
