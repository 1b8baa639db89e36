"""Policies by name, and those of a user's file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from engines.routing.costs import earliest_first_token
from engines.routing.load import least_loaded, round_robin, session_hash
from engines.routing.prefix import longest_prefix
from engines.routing.records import Policy, RoutedEngine, RoutedRequest
from engines.routing.workload import WorkloadAware
from tracefile.records.errors import InputError, failure_words


@runtime_checkable
class Learner(Protocol):
    """A policy that learns from the requests' course: an object to be called, with these two methods."""

    def sent(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        """Learn the engine that a request was sent to; its overlap is still that of the request."""

    def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
        """Learn that a request has ended, however it did."""


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy that a flag may name."""

    make: Callable[[], Policy]
    """Makes it for one router: a policy's state is never shared."""
    uses_cache: bool = False
    """It reads ``RoutedEngine.overlap``: the router needs to know the engines' caches."""


POLICIES: dict[str, PolicyKind] = {
    "round-robin": PolicyKind(lambda: round_robin),
    "least-loaded": PolicyKind(lambda: least_loaded),
    "session": PolicyKind(lambda: session_hash),
    "prefix": PolicyKind(lambda: longest_prefix, uses_cache=True),
    "cost": PolicyKind(lambda: earliest_first_token, uses_cache=True),
    "workload": PolicyKind(WorkloadAware, uses_cache=True),
}


def user_policy(path: str, function: str) -> PolicyKind:
    """Return the policy ``function`` of a Python file. Raises InputError if it cannot be loaded."""
    name = f"{path}:{function}" if function else path
    policy = _loaded(name, path, function)

    def choose(request: RoutedRequest, engines: list[RoutedEngine]) -> int:
        place = policy(request, engines)
        if type(place) is not int or not 0 <= place < len(engines):
            raise InputError(f"--route {name}: returned {place!r}; expected a place from 0 to {len(engines) - 1}")
        return place

    return PolicyKind(lambda: choose, uses_cache=True)


def _loaded(name: str, path: str, function: str) -> Callable[..., Any]:
    if not function.isidentifier() or not Path(path).is_file():
        raise InputError(
            f"--route {name}: expected FILE.py:FUNCTION, a function of (request, engines) in a Python file"
        )
    spec = importlib.util.spec_from_file_location(f"kvtape_route_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found: Callable[..., Any] = getattr(module, function)
        inspect.signature(found).bind(None, ())
    except (Exception, SystemExit) as error:
        words = f"{failure_words(error)}: {' '.join(str(error).split())}"
        raise InputError(f"--route {name}: {words}; expected a function of (request, engines)") from None
    return found
