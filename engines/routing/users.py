"""Policies from a user's file: a function of a request and the engines, called as it is."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines.routing.policies import PolicyKind
from engines.routing.records import RoutedEngine, RoutedRequest
from tracefile.records.errors import InputError, failure_words


def user_policy(path: str, function: str) -> PolicyKind:
    """Return the kind of the policy ``function`` of a Python file. Raises InputError if it cannot be loaded."""
    name = f"{path}:{function}" if function else path
    policy = _loaded(name, path, function)
    try:
        inspect.signature(policy).bind(None, ())
    except (TypeError, ValueError) as error:
        raise InputError(f"--route {name}: {_worded(error)}; expected a function of (request, engines)") from None

    def choose(request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        place = policy(request, engines)
        if type(place) is not int or not 0 <= place < len(engines):
            raise InputError(f"--route {name}: returned {place!r}; expected a place from 0 to {len(engines) - 1}")
        return place

    return PolicyKind(lambda _: choose, uses_cache=True, uses_active=True)


def _loaded(name: str, path: str, function: str) -> Callable[..., Any]:
    if not function.isidentifier():
        raise InputError(f"--route {name}: names no function; expected {path}:FUNCTION")
    if not Path(path).is_file():
        raise InputError(f"--route {name}: {path} is no file; expected a Python file with a function {function}")
    spec = importlib.util.spec_from_file_location(f"kvtape_route_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"--route {name}: {path} cannot be loaded: {_worded(error)}") from None
    found = getattr(module, function, None)
    if not inspect.isfunction(found):
        raise InputError(f"--route {name}: {path} has no function {function}")
    return found


def _worded(error: BaseException) -> str:
    """Return an exception of a file that is being loaded, in one line: no request is known yet."""
    return f"{failure_words(error)}: {' '.join(str(error).split())}"
