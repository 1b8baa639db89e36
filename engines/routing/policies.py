"""Registry of routing policies, and the loader of policies from a user's file."""

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
    """A stateful policy: a callable object that is notified of each request's dispatch and end."""

    def sent(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        """Record that a request was sent to an engine, whose prefix overlap is still that of the request."""

    def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
        """Record that a request has ended, with or without success."""


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy that ``--route`` can name."""

    make: Callable[[], Policy]
    """Creates the policy of one router: state is never shared."""
    uses_cache: bool = False
    """True: the policy reads ``RoutedEngine.overlap``, so the router needs a prefix index."""


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
        index = policy(request, engines)
        if type(index) is not int or not 0 <= index < len(engines):
            raise InputError(f"--route {name}: returned {index!r}; expected an index from 0 to {len(engines) - 1}")
        return index

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
        policy: Callable[..., Any] = getattr(module, function)
        inspect.signature(policy).bind(None, ())
    except (Exception, SystemExit) as error:
        words = f"{failure_words(error)}: {' '.join(str(error).split())}"
        raise InputError(f"--route {name}: {words}; expected a function of (request, engines)") from None
    return policy
