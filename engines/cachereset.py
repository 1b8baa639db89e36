"""Emptying the engine's prefix cache before a run, and checking that it is empty."""

from engines.dialect import Control, Dialect
from engines.recognition import DIALECTS
from tracefile.records.errors import InputError
from wire.answer import parse_answer


def reset_prefix_cache(control: Control, dialect: Dialect, probe: bytes) -> str | None:
    """Reset, and check that the cache is empty; return a note if that could not be checked.

    ``probe`` is the body of a request for a prompt of two blocks, new in every call. It is sent before and after the
    reset: the second time none of it may be cached. A last reset takes the probe itself out of the cache.
    Raises InputError if the engine has no reset or the reset does not work.
    """
    reset = dialect.reset_cache
    if reset is None:
        able = ", ".join(name for name, other in DIALECTS.items() if other.reset_cache is not None)
        raise InputError(f"--reset-cache: not known how with --dialect {dialect.name}; expected {able}")
    _cached_tokens(control, dialect, probe)
    reset(control)
    cached_tokens = _cached_tokens(control, dialect, probe)
    reset(control)
    if cached_tokens is None:
        return "--reset-cache: done, but the engine reports no cached tokens, so whether it worked is not known"
    if cached_tokens > 0:
        raise InputError(
            f"--reset-cache: {cached_tokens} tokens still cached after {dialect.name}'s reset; expected none"
            + dialect.reset_hint
        )
    return None


def _cached_tokens(control: Control, dialect: Dialect, probe: bytes) -> int | None:
    """Return the cached tokens of one small request; null: not reported."""
    response = control.post(dialect.path, probe)
    if not response.is_success:
        raise InputError(f"--reset-cache: the check's own request gave HTTP {response.status}; expected 200")
    return parse_answer(dialect.path, [(0, response.content)], stream=False).cached_tokens
