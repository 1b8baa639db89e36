"""Faults on purpose: which go wrong is drawn by the request's id or number, so that a run can be repeated.

    KIND[=VALUE][:RATE]     429:0.05   429=3:0.05   latency=20-80:1   stall=2000:0.01   reset:0.01

``latency`` is the engine's time, before its scheduler gets the request; the other times are the client's, in real ms.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import xxhash

from tracefile.records.errors import InputError

Ending = Literal["reset", "truncate"]
DEFAULTS = {"latency": "100", "slow-first-byte": "1000", "stall": "1000", "garbage": "", "truncate": "", "reset": ""}
"""Every kind but refusals, which are named by their status, with the value it has if none is given; "": takes none."""
RETRY_AFTER_S = "1"
_FAULT = re.compile(r"([a-z-]+|[45]\d\d)(?:=([^:]*))?(?::([^:]*))?")
_SPREAD = re.compile(r"(exp)?(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds (or seconds to come back after): ``50``, ``20-80`` (any between), or ``exp50`` (that mean)."""

    low: float
    high: float
    is_exponential: bool = False

    def at(self, share: float) -> float:
        """The value that ``share`` of all draws stay below."""
        return -self.low * float(np.log1p(-share)) if self.is_exponential else self.low + share * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, its size and its rate."""

    kind: str
    """A status to refuse with, or a name of ``DEFAULTS``."""
    spread: Spread
    rate: float
    """Share of requests."""
    text: str

    @property
    def is_refusal(self) -> bool:
        return self.kind.isdigit()


@dataclass(slots=True)
class Injection:
    """The faults of one request."""

    refusal: int | None = None
    retry_after_s: int = 0
    extra_ms: float = 0.0
    first_byte_ms: float = 0.0
    stall_ms: float = 0.0
    garbage: bool = False
    ending: Ending | None = None
    share: float = 0.0
    """How far into the output what happens in its middle happens; 1 is its end."""


@dataclass(slots=True)
class Faults:
    """The faults in force."""

    rules: tuple[Fault, ...]
    seed: int
    by_request: bool = False
    """Whether a request's ``X-Fault`` header counts, and ``/faults`` may change the rules."""
    injected: dict[str, int] = field(default_factory=dict)
    _requests: int = 0

    def draw(self, request_id: str | None, header: str | None) -> Injection | None:
        """Draw the next request's faults; None: none. Raises InputError for a malformed header."""
        key = f"#{self._requests}" if request_id is None else request_id
        self._requests += 1
        rules = self.rules
        if header is not None and self.by_request:
            rules = (*rules, *parse_faults(header.split(","), "X-Fault"))
        return self._injection(rules, key) if rules else None

    def _injection(self, rules: Sequence[Fault], key: str) -> Injection | None:
        hit = [(fault, place) for place, fault in enumerate(rules) if self._share(key, f"{place} hit") < fault.rate]
        refusals = [(fault, place) for fault, place in hit if fault.is_refusal]
        if not hit:
            return None
        injection = Injection(share=self._share(key, "where"))
        for fault, place in refusals[:1] or hit:
            self.injected[fault.kind] = self.injected.get(fault.kind, 0) + 1
            _apply(injection, fault, fault.spread.at(self._share(key, f"{place} size")))
        return injection

    def _share(self, key: str, what: str) -> float:
        return xxhash.xxh3_64_intdigest(f"{what} {key}".encode(), seed=self.seed & 0xFFFFFFFFFFFFFFFF) / 2.0**64


def _apply(injection: Injection, fault: Fault, value: float) -> None:
    if fault.is_refusal:
        injection.refusal, injection.retry_after_s = int(fault.kind), round(value)
    elif fault.kind == "latency":
        injection.extra_ms += value
    elif fault.kind == "slow-first-byte":
        injection.first_byte_ms += value
    elif fault.kind == "stall":
        injection.stall_ms += value
    elif fault.kind == "garbage":
        injection.garbage = True
    else:
        injection.ending = "reset" if fault.kind == "reset" else "truncate"


def parse_faults(texts: Iterable[str], where: str) -> tuple[Fault, ...]:
    """Faults as written; ``where`` they were, for errors. Raises InputError."""
    return tuple(_parse_fault(text.strip(), where) for text in texts if text.strip())


def _parse_fault(text: str, where: str) -> Fault:
    found = _FAULT.fullmatch(text)
    kind = found[1] if found is not None else ""
    if found is None or not (kind.isdigit() or kind in DEFAULTS):
        known = ", ".join(DEFAULTS)
        raise InputError(f"{where} {text}: expected KIND[=VALUE][:RATE], KIND being a status of 400 … 599, {known}")
    default = RETRY_AFTER_S if kind.isdigit() else DEFAULTS[kind]
    if found[2] is not None and not default:
        raise InputError(f"{where} {text}: {kind} takes no value")
    return Fault(
        kind,
        _parse_spread(default or "0" if found[2] is None else found[2], text, where),
        _parse_rate(found[3], text, where),
        text,
    )


def _parse_spread(value: str, text: str, where: str) -> Spread:
    found = _SPREAD.fullmatch(value)
    if found is None or (found[1] and found[3]):
        raise InputError(f"{where} {text}: {value!r} is neither a number, nor LOW-HIGH, nor expMEAN")
    low = float(found[2])
    high = low if found[3] is None else float(found[3])
    if high < low:
        raise InputError(f"{where} {text}: {value!r} goes down; expected LOW-HIGH")
    return Spread(low, high, is_exponential=found[1] is not None)


def _parse_rate(value: str | None, text: str, where: str) -> float:
    try:
        rate = 1.0 if value is None else float(value)
    except ValueError:
        rate = -1.0
    if not 0.0 <= rate <= 1.0:
        raise InputError(f"{where} {text}: rate {value!r}; expected a share from 0 to 1")
    return rate
