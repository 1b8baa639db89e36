"""``--route``: a policy with its settings in one word, and the router that is made of it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from engines.routing.costs import at_speed, read_costs
from engines.routing.index import ActiveBlocks, PrefixIndex
from engines.routing.policies import POLICIES, PolicyKind, PolicySettings
from engines.routing.records import TOKENS_ALONE, RoutingCosts
from engines.routing.router import ADAPTER_SLOTS, Knowledge, Router
from engines.routing.sessions import read_statistics
from tracefile.commandline.durations import duration
from tracefile.records.errors import InputError
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    from engines.routing import users
else:  # which most fleets have none of
    users = LateModule("engines.routing.users")

CacheKnowledge = Literal["complete", "partial", "none"]
"""``complete``: of the engines' caches as they are; ``partial``: the router's own index; ``none``: overlaps are 0."""
INDEX_BLOCKS = 65_536
"""Blocks that the own index keeps of each engine where the engine's capacity is not known."""
ROUTE_HELP = (
    f"policy: {', '.join(POLICIES)}, or FILE.py:FUNCTION; settings follow, as in overlap:overlap-weight=2:lag=250ms "
    "(docs/fleet.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A policy chosen on the command line. Each router makes its own; another process parses ``text`` again."""

    text: str
    """As given."""
    kind: PolicyKind
    settings: PolicySettings
    knowledge: CacheKnowledge = "partial"
    index_blocks: int | None = None
    """Blocks that the own index keeps of each engine. None: the engine's capacity, ``INDEX_BLOCKS`` if not known."""
    lag_s: float = 0.0
    """Time from sending a request until the own index counts its blocks."""
    costs: RoutingCosts | None = None
    """Of the latency model that was named. None: each engine's own."""


@cache
def parse_route(text: str) -> Route:
    """Read ``NAME[:SETTING=VALUE]…`` or ``FILE.py:FUNCTION[:SETTING=VALUE]…``. Raises InputError."""
    name, *words = text.split(":")
    if name.endswith(".py"):
        function, words = (words[0], words[1:]) if words else ("", [])
        kind = users.user_policy(name, function)
    elif name in POLICIES:
        kind = POLICIES[name]
    else:
        raise InputError(f"--route {text}: unknown policy; expected one of {', '.join(POLICIES)}, or FILE.py:FUNCTION")
    values = dict(_setting(text, word) for word in words)
    own = {name: values.pop(name) for name in ("knowledge", "index_blocks", "lag_s", "costs") if name in values}
    return Route(text=text, kind=kind, settings=PolicySettings(**values), **own)


def make_router(
    route: Route,
    names: Sequence[str],
    *,
    complete: Knowledge | None = None,
    capacity_blocks: int = 0,
    costs: Sequence[RoutingCosts] = (),
    speeds: Sequence[float] = (),
    adapter_slots: int = ADAPTER_SLOTS,
) -> Router:
    """Return a router over engines of these names. ``complete``: knowledge of their caches; None: there is none.

    Raises InputError if the route needs complete knowledge and there is none.
    """
    knowledge: Knowledge | None = None
    if route.kind.uses_cache and route.knowledge == "partial":
        blocks = route.index_blocks or capacity_blocks or INDEX_BLOCKS
        knowledge = PrefixIndex(len(names), capacity_blocks=blocks, lag_s=route.lag_s)
    elif route.kind.uses_cache and route.knowledge == "complete":
        if complete is None:
            raise InputError(
                f"--route {route.text}: the engines' caches are not known here; expected knowledge=partial"
            )
        knowledge = complete
    return Router(
        names,
        route.kind.make(route.settings),
        knowledge=knowledge,
        capacity_blocks=capacity_blocks,
        costs=_each_costs(route, costs, speeds or [1.0] * len(names)),
        speeds=speeds,
        adapter_slots=adapter_slots,
        active=ActiveBlocks(len(names)) if route.kind.uses_active else None,
    )


def _each_costs(route: Route, costs: Sequence[RoutingCosts], speeds: Sequence[float]) -> Sequence[RoutingCosts]:
    """Return each engine's costs: those of the route's model or of tokens alone at its speed, or its own."""
    if route.costs is None and costs:
        return costs
    return [at_speed(route.costs or TOKENS_ALONE, speed) for speed in speeds]


_NUMBERS = {field.name: field.type for field in dataclasses.fields(PolicySettings) if field.type in (int, float)}
_SETTINGS = (*(name.replace("_", "-") for name in _NUMBERS), "knowledge", "index-blocks", "lag", "model", "trace")


def _setting(text: str, word: str) -> tuple[str, Any]:
    """Read one SETTING=VALUE: its field, and the value."""
    shown, equals, value = word.partition("=")
    name = shown.replace("-", "_")
    if not equals or shown not in _SETTINGS:
        raise InputError(f"--route {text}: {word!r}; expected SETTING=VALUE, a setting of {', '.join(_SETTINGS)}")
    if name == "knowledge":
        if value not in get_args(CacheKnowledge):
            raise InputError(f"--route {text}: {word}; expected one of {', '.join(get_args(CacheKnowledge))}")
        return name, value
    if name == "lag":
        return "lag_s", _lag_s(text, value)
    if name in ("model", "trace"):
        try:
            return ("costs", read_costs(value)) if name == "model" else ("statistics", read_statistics(value))
        except InputError as error:
            raise InputError(f"--route {text}: {error}") from None
    whole = name == "index_blocks" or _NUMBERS[name] is int
    least = {"load_factor": 1.0, "index_blocks": 1.0, "adapter_slots": 1.0}.get(name, 0.0)
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = -1
    if not least <= number < float("inf"):
        raise InputError(
            f"--route {text}: {word}; expected {'a whole number' if whole else 'a number'}, {least:g} or more"
        )
    return name, number


def _lag_s(text: str, value: str) -> float:
    try:
        return duration(value)
    except Exception as error:
        raise InputError(f"--route {text}: lag={error}") from None
