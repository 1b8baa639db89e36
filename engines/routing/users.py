"""Policies from a user's file, guarded: requests are served on whatever the policy does."""

import importlib.util
import inspect
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, Final

from engines.routing.load import round_robin
from engines.routing.policies import PolicyKind
from engines.routing.records import Policy, RoutedEngine, RoutedRequest
from tracefile.records.errors import InputError

LONGEST_CHOICE_S: Final = 0.05
"""Time that a choice may take: all streams of the process wait meanwhile. A policy that takes longer is set aside."""
FALLBACK: Final = round_robin


def user_policy(path: str, function: str) -> PolicyKind:
    """Return the kind of the policy ``function`` of a Python file. Raises InputError if it cannot be loaded."""
    place = f"{path}:{function}" if function else path
    found = _loaded(place, path, function)
    try:
        made = found() if isinstance(found, type) else found
        inspect.signature(made).bind(None, ())
    except Exception as error:
        raise InputError(f"--route {place}: {_worded(error)}; expected a function of (request, engines)") from None

    def make(_: object) -> Policy:
        return GuardedPolicy(place, found() if isinstance(found, type) else found)

    return PolicyKind(make, "what its function reads", uses_cache=True)


class GuardedPolicy:
    """A policy whose faults cost it a choice: the request goes by ``FALLBACK``, the first of each kind is told.

    Faults are an exception, a value that is no place of an engine, and a choice that takes longer than
    ``LONGEST_CHOICE_S``. Such a choice is interrupted on the main thread, and ends the policy's use at once.
    """

    def __init__(self, name: str, policy: Callable[..., Any]) -> None:
        self.faults: Counter[str] = Counter()
        """By kind: raises, no engine, too slow."""
        self.tell: Callable[[str], None] = _tell
        self._name, self._policy = name, policy
        self._choosing = False
        self._set_aside = False
        self._learns = hasattr(policy, "sent") and hasattr(policy, "ended")

    def __call__(self, request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        if not self._set_aside:
            place = self._guarded(self._policy, request, engines)
            if type(place) is int and 0 <= place < len(engines):
                return place
            if place is not _FAILED:
                self._fault("no engine", f"returned {place!r:.60}; expected 0 to {len(engines) - 1}")
        return FALLBACK(request, engines)

    def sent(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        if self._learns and not self._set_aside:
            self._guarded(self._policy.sent, request, engine)  # type: ignore[attr-defined]

    def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
        if self._learns and not self._set_aside:
            self._guarded(self._policy.ended, request, engine, now_s)  # type: ignore[attr-defined]

    def _guarded(self, call: Callable[..., Any], *arguments: object) -> object:
        began_s = perf_counter()
        interrupts = threading.current_thread() is threading.main_thread()
        if interrupts:
            before = signal.signal(signal.SIGALRM, self._interrupt)
            signal.setitimer(signal.ITIMER_REAL, LONGEST_CHOICE_S, LONGEST_CHOICE_S)
        found: object = _FAILED
        try:
            self._choosing = True
            found = call(*arguments)
            self._choosing = False
        except _TooSlowError:
            pass
        except (Exception, SystemExit) as error:
            self._fault("raises", f"raised {_worded(error)}")
        finally:
            self._choosing = False
            if interrupts:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                signal.signal(signal.SIGALRM, before)
        if perf_counter() - began_s >= LONGEST_CHOICE_S:
            self._set_aside = True
            self._fault("too slow", f"took longer than {LONGEST_CHOICE_S * 1e3:g} ms and is not asked again")
        return found

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._choosing:
            raise _TooSlowError

    def _fault(self, kind: str, what: str) -> None:
        self.faults[kind] += 1
        if self.faults[kind] == 1:
            self.tell(f"--route {self._name}: {what}; its requests go round-robin")


class _TooSlowError(BaseException):
    """Ends a policy that takes too long; no ``except Exception`` of the user's catches it."""


_FAILED: Final = object()


def _loaded(place: str, path: str, function: str) -> Callable[..., Any]:
    if not function.isidentifier():
        raise InputError(f"--route {place}: names no function; expected {path}:FUNCTION")
    if not Path(path).is_file():
        raise InputError(f"--route {place}: {path} is no file; expected a Python file with a function {function}")
    spec = importlib.util.spec_from_file_location(f"kvtape_route_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"--route {place}: {path} cannot be loaded: {_worded(error)}") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"--route {place}: {path} has no function {function}")
    return found  # type: ignore[no-any-return]


def _worded(error: BaseException) -> str:
    """Return an exception in one line, with the user's line where it has one."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = "" if traceback is None else f" (line {traceback.tb_lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
