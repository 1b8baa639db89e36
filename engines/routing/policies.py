"""Policies by name, and the settings that make them."""

from collections.abc import Callable
from dataclasses import dataclass

from engines.routing.costs import earliest_first_token
from engines.routing.load import least_loaded, power_of_two, random_choice, round_robin
from engines.routing.prefix import longest_prefix, overlap_against_load
from engines.routing.records import Policy
from engines.routing.rendezvous import bounded_hash, session_hash
from engines.routing.sessions import SessionStatistics
from engines.routing.workload import WorkloadAware


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Numbers that policies are made from; each policy reads its own. Their names are those of ``--route``."""

    seed: int = 0
    """random, power-of-two: seed of the draws."""
    load_factor: float = 1.25
    """bounded: requests that an engine may hold, over its share."""
    overlap_weight: float = 1.0
    """overlap: weight of the prefill against the tokens held."""
    adapter_load_tokens: float = 1000.0
    """overlap, cost, workload: prefill tokens that loading a missing LoRA adapter takes as long as."""
    adapter_slots: int = 1
    """tap: LoRA adapters that an engine keeps, vLLM's ``max_loras``; simulated engines tell their own."""
    statistics: SessionStatistics | None = None
    """workload: statistics of a trace to begin with. None: learnt from the requests alone."""


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy that a flag may name."""

    make: Callable[[PolicySettings], Policy]
    """Makes it for one router: a policy's state is never shared."""
    uses_cache: bool = False
    """It reads ``RoutedEngine.overlap``: the router needs to know the engines' caches."""
    uses_active: bool = False
    """It reads ``RoutedEngine.repeated_tokens``: the router keeps the blocks of the requests in flight."""


def _stateless(policy: Policy) -> Callable[[PolicySettings], Policy]:
    return lambda _: policy


POLICIES: dict[str, PolicyKind] = {
    "round-robin": PolicyKind(_stateless(round_robin)),
    "random": PolicyKind(lambda settings: random_choice(settings.seed)),
    "least-loaded": PolicyKind(_stateless(least_loaded)),
    "power-of-two": PolicyKind(lambda settings: power_of_two(settings.seed)),
    "session": PolicyKind(_stateless(session_hash)),
    "bounded": PolicyKind(lambda settings: bounded_hash(settings.load_factor)),
    "prefix": PolicyKind(_stateless(longest_prefix), uses_cache=True),
    "overlap": PolicyKind(
        lambda settings: overlap_against_load(settings.overlap_weight, settings.adapter_load_tokens),
        uses_cache=True,
        uses_active=True,
    ),
    "cost": PolicyKind(lambda settings: earliest_first_token(settings.adapter_load_tokens), uses_cache=True),
    "workload": PolicyKind(
        lambda settings: WorkloadAware(settings.statistics, settings.adapter_load_tokens),
        uses_cache=True,
    ),
}
