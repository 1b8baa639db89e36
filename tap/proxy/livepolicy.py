"""A policy on live traffic: a user's own that raises, blocks or names no upstream costs a line, never a request."""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from types import FrameType

from engines.routing.load import least_loaded
from engines.routing.policies import POLICIES, PolicySettings
from engines.routing.records import Policy, RoutedEngine, RoutedRequest
from wire.process import failure_words

MOST_S = 0.02
"""Time that a user's policy has: all streams of the worker wait for it."""
SUSPENDED_S = 60.0
"""Time without a policy that has blocked."""
SAID_EVERY_S = 60.0
FORGETFUL = frozenset({"round-robin", "random", "least-loaded", "power-of-two"})
"""Policies that send a session's requests anywhere."""


class LivePolicy:
    """A policy, with what it needs to see, and the count of its failures."""

    def __init__(self, policy: Policy, *, reads_prompt: bool, keeps_sessions: bool, trusted: bool = True) -> None:
        """``trusted``: it is one of ours; a user's own is watched."""
        self.reads_prompt, self.keeps_sessions = reads_prompt, keeps_sessions
        self.failures: Counter[str] = Counter()
        """Requests that another rule routed, by reason: raised, blocked, suspended, nonsense."""
        self._policy = policy
        self.choose: Policy = policy if trusted else self._watched
        self.learns = hasattr(policy, "sent") and hasattr(policy, "ended")
        self._suspended_s = 0.0
        self._said_s = float("-inf")

    def sent(self, request: RoutedRequest, place: int) -> None:
        self._tell("sent", request, place)

    def ended(self, request: RoutedRequest, place: int, now_s: float) -> None:
        self._tell("ended", request, place, now_s)

    def _tell(self, method: str, *facts: object) -> None:
        try:
            getattr(self._policy, method)(*facts)
        except Exception as error:  # a user's own code
            self._failed("raised", failure_words(error))

    def _watched(self, request: RoutedRequest, engines: Sequence[RoutedEngine]) -> int:
        if self._suspended_s > monotonic():
            self.failures["suspended"] += 1
            return least_loaded(request, engines)
        try:
            place = within(MOST_S, lambda: self._policy(request, engines))
        except BlockedError:
            self._suspended_s = monotonic() + SUSPENDED_S
            self._failed("blocked", f"no upstream within {1e3 * MOST_S:.0f} ms; suspended for {SUSPENDED_S:.0f} s")
        except Exception as error:  # a user's own code
            self._failed("raised", failure_words(error))
        else:
            if type(place) is int and 0 <= place < len(engines):
                return place
            self._failed("nonsense", f"it returned {place!r:.40}; expected a place from 0 to {len(engines) - 1}")
        return least_loaded(request, engines)

    def _failed(self, reason: str, words: str) -> None:
        self.failures[reason] += 1
        now_s = monotonic()
        if now_s - self._said_s >= SAID_EVERY_S:
            self._said_s = now_s
            print(
                f"tap: --route: the policy failed ({words}); least-loaded routes instead", file=sys.stderr, flush=True
            )


class BlockedError(BaseException):
    """A policy took too long; no ``except Exception`` of its own holds this back."""


def within(most_s: float, call: Callable[[], int]) -> int:
    """Return the result of a call, of Python alone or asleep. Raises BlockedError after ``most_s``.

    For the main thread: a timer's signal interrupts it.
    """
    running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if running:
            raise BlockedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, most_s)
        result = call()
        running = False
        return result
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def live_policy(route: str, seed: int = 0) -> LivePolicy:
    """Return the policy of a flag. ``seed``: of its draws, another one for each worker."""
    kind = POLICIES[route]
    policy = kind.make(PolicySettings(seed=seed))
    return LivePolicy(policy, reads_prompt=kind.uses_cache, keeps_sessions=route not in FORGETFUL)
