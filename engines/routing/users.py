"""Policies from a user's file, guarded: requests are served on whatever the policy does."""

import contextlib
import ctypes
import importlib.util
import inspect
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep, thread_time
from types import FrameType
from typing import Any, Final

from engines.routing.load import least_loaded
from engines.routing.policies import PolicyKind
from engines.routing.records import Policy, RoutedEngine, RoutedRequest
from engines.routing.router import Learner
from tracefile.records.errors import InputError, failure_words

MOST_S: Final = 0.02
"""CPU time that a user's policy has: all streams of the process wait for it."""
MOST_TICKS: Final = 5
"""Times ``MOST_S`` that it may take without CPU, asleep or while the process is preempted."""
MOST_THREAD_S: Final = 5.0
"""Time that it may take in a thread, which may have waited for others meanwhile."""
SUSPENDED_S: Final = 60.0
"""Time without a policy that has blocked, on the router's clock."""
SAID_EVERY_S: Final = 60.0
"""Time between two lines about one policy, on the router's clock."""
FALLBACK: Final = least_loaded


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

    return PolicyKind(make, uses_cache=True, uses_active=True)


class GuardedPolicy:
    """A policy whose faults cost it a choice: the request goes by ``FALLBACK``, and a line tells of it.

    Faults are an exception, a value that is no place of an engine, and a call that takes longer than ``MOST_S``. On
    the main thread such a call is interrupted; in any case the policy is not asked for ``SUSPENDED_S``. A process that
    is preempted gets one signal for all the time it missed, so it is not the policy that is blamed. Lines name the
    exception and its place, and numbers returned, but no text: it may quote a request.
    """

    def __init__(self, name: str, policy: Callable[..., Any]) -> None:
        self.faults: Counter[str] = Counter()
        """Requests that ``FALLBACK`` routed, by reason: raised, blocked, suspended, nonsense; faults of learning."""
        self._name, self._policy = name, policy
        self._learner = policy if isinstance(policy, Learner) else None
        self._suspended_s = self._said_s = float("-inf")
        self._calling = False
        self._began_s, self._ticks = 0.0, 0

    def __call__(self, request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        now_s = request.arrival_s
        if now_s < self._suspended_s:
            self.faults["suspended"] += 1
            return FALLBACK(request, engines)
        place = self._guarded(now_s, self._policy, request, engines)
        if type(place) is int and 0 <= place < len(engines):
            return place
        if place is not _FAILED:
            shown = f"{place}" if place is None or isinstance(place, int | float) else f"a {type(place).__name__}"
            expected = f"a place from 0 to {len(engines) - 1}"
            self._fault("nonsense", f"returned {shown}; expected {expected}; least-loaded routes instead", now_s)
        return FALLBACK(request, engines)

    def sent(self, request: RoutedRequest, engine: RoutedEngine) -> None:
        if self._learner is not None and request.arrival_s >= self._suspended_s:
            self._guarded(request.arrival_s, self._learner.sent, request, engine)

    def ended(self, request: RoutedRequest, engine: RoutedEngine, now_s: float) -> None:
        if self._learner is not None and now_s >= self._suspended_s:
            self._guarded(now_s, self._learner.ended, request, engine, now_s)

    def _guarded(self, now_s: float, call: Callable[..., Any], *arguments: object) -> object:
        """Return what a call returns, ``_FAILED`` where it raised or took too long."""
        self._began_s, self._ticks = thread_time(), 0
        found: object = _FAILED
        try:
            with self._interrupted_late():
                self._calling = True
                found = call(*arguments)
                self._calling = False
        except _BlockedError:
            self._ticks = MOST_TICKS
        except (Exception, SystemExit) as error:
            words = type(error).__name__ if isinstance(error, RuntimeError) else failure_words(error)
            instead = "least-loaded routes instead" if call is self._policy else "it has not learnt of that request"
            self._fault("raised", f"raised {words}; {instead}", now_s)
        if self._ticks >= MOST_TICKS or thread_time() - self._began_s >= MOST_S:
            self._suspended_s = now_s + SUSPENDED_S
            suspended = f"suspended for {SUSPENDED_S:g} s; least-loaded routes instead"
            self._fault("blocked", f"took more than {MOST_S * 1e3:g} ms; {suspended}", now_s)
            return _FAILED
        return found

    @contextlib.contextmanager
    def _interrupted_late(self) -> Iterator[None]:
        """Interrupt a call that takes too long: on the main thread by signals, which no other thread gets."""
        if threading.current_thread() is not threading.main_thread():
            try:
                _WATCH.begin(threading.get_ident())
                yield
            finally:
                _WATCH.end(threading.get_ident())
            return
        before = signal.signal(signal.SIGALRM, self._interrupt)
        signal.setitimer(signal.ITIMER_REAL, MOST_S, MOST_S)
        try:
            yield
        finally:
            self._calling = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._ticks += 1
        if self._calling and (self._ticks >= MOST_TICKS or thread_time() - self._began_s >= MOST_S):
            raise _BlockedError

    def _fault(self, kind: str, what: str, now_s: float) -> None:
        self.faults[kind] += 1
        if now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            print(f"--route {self._name}: {what}", file=sys.stderr, flush=True)


class _Watch:
    """Interrupts calls in threads other than the main one, as those of a forecast's members, after ``MOST_THREAD_S``.

    Pure Python is interrupted; a call that sleeps is when it wakes.
    """

    def __init__(self) -> None:
        self._until_s: dict[int, float] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, thread: int) -> None:
        with self._lock:
            self._until_s[thread] = monotonic() + MOST_THREAD_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="route watch", daemon=True)
                self._thread.start()

    def end(self, thread: int) -> None:
        # Under the lock, an interruption is raised here or before, where the guard expects it, and not later.
        with self._lock:
            self._until_s.pop(thread, None)

    def _run(self) -> None:
        while True:
            sleep(MOST_THREAD_S / 4)
            with self._lock:
                now_s = monotonic()
                late = [thread for thread, until_s in self._until_s.items() if now_s > until_s]
                for thread in late:  # once each: the guard is not to be interrupted
                    del self._until_s[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_BlockedError))


_WATCH: Final = _Watch()


class _BlockedError(BaseException):
    """Ends a call that takes too long; no ``except Exception`` of the user's holds it back."""


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
    """Return an exception of a file that is being loaded, in one line: no request is known yet."""
    return f"{failure_words(error)}: {' '.join(str(error).split())}"
