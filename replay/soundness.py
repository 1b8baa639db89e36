"""What a trace must not say if it is to be sent again: each breach is an InputError that names the line and the field.

The schema's own invariants are ``tracefile check``'s; those that a replay stands on are held here, and what no request
can be in earnest: a prompt of 10**12 tokens is refused, not expanded.
"""

from collections.abc import Mapping
from itertools import chain

from tracefile import InputError, Meta, Record, RequestId
from tracefile.study.checking import Rule, check_hashes, check_signs

MOST_TOKENS = 1 << 24
"""Of one prompt, one answer, or one block: some ten times the longest context that is served."""
MOST_CHOICES = 1 << 10
LONGEST_MS = 366 * 24 * 3600 * 1000.0
"""From one end of a trace to the other: beyond it, a clock was misread and the run would wait for ever."""

RULES: tuple[Rule, ...] = (check_signs, check_hashes)

BOUNDS = (("prompt_tokens", MOST_TOKENS), ("output_tokens", MOST_TOKENS), ("max_tokens", MOST_TOKENS))


def check_meta(meta: Meta, path: str) -> None:
    """Raise InputError if the header's blocks cannot be."""
    size = meta.block_size
    if size is not None and not 1 <= size <= MOST_TOKENS:
        raise InputError(f"{path}:1: meta.block_size: {size}; expected 1 to {MOST_TOKENS}")


def check_record(record: Record, block_size: int | None, where: str) -> None:
    """Raise InputError for lengths, times and hashes that cannot be."""
    for field, what in chain.from_iterable(rule(record, block_size) for rule in RULES):
        raise InputError(f"{where}: {field}: {what}")
    if record.prompt_tokens == 0:
        raise InputError(f"{where}: prompt_tokens: 0; expected 1 or more")
    for field, most in (*BOUNDS, ("n", MOST_CHOICES)):
        value = getattr(record, field)
        if value is not None and value > most:
            raise InputError(f"{where}: {field}: {value}; expected at most {most}")
    if record.prompt_tokens is None and len(record.block_hashes or ()) * (block_size or 1) > MOST_TOKENS:
        raise InputError(f"{where}: block_hashes: of a prompt beyond {MOST_TOKENS} tokens; expected a shorter one")
    if record.itl_tokens and not 0 <= min(record.itl_tokens) <= max(record.itl_tokens) <= MOST_TOKENS:
        raise InputError(f"{where}: itl_tokens: {min(record.itl_tokens)}; expected 0 to {MOST_TOKENS}")
    if record.arrival_ms is not None and record.arrival_ms + (record.e2e_ms or 0.0) > LONGEST_MS:
        raise InputError(
            f"{where}: arrival_ms: {record.arrival_ms:g}; expected an end within a year of the trace's zero"
        )
    if not record.request_id.isascii() or not record.request_id.isprintable() or not record.request_id:
        raise InputError(f"{where}: request_id: {record.request_id!r}; expected printable ASCII, as headers carry it")
    if record.session_id is not None and not (record.session_id.isascii() and record.session_id.isprintable()):
        raise InputError(f"{where}: session_id: {record.session_id!r}; expected printable ASCII, as headers carry it")


def find_cycle(parents: Mapping[RequestId, RequestId]) -> RequestId | None:
    """A request that is its own ancestor; null: there is none. ``parents``: each child's parent."""
    sound: set[RequestId] = set()
    for start in parents:
        trail: dict[RequestId, None] = {}
        at: RequestId | None = start
        while at is not None and at not in sound:
            if at in trail:
                return at
            trail[at] = None
            at = parents.get(at)
        sound.update(trail)
    return None
