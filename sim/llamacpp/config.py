"""Settings of llama.cpp's slots and prompt cache, and their flags."""

import argparse
from dataclasses import dataclass
from typing import Final

from tracefile.records.errors import InputError
from tracefile.records.schema import Engine

MOST_SLOTS: Final = 4096
"""Above llama.cpp's limit of 256 sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotConfig:
    """Slots and prompt cache of llama.cpp; defaults of a server without ``--parallel``. Raises InputError."""

    slots: int = 4
    """``--parallel``: most running requests."""
    slot_prompt_similarity: float = 0.1
    """Share of a prompt that a slot must have cached to be selected by prefix. 0: selection by last use alone."""
    kv_unified: bool = True
    """All slots have one KV buffer: the tokens of an idle slot move to the prompt cache when a request starts."""
    cache_idle_slots: bool = True
    """Idle slots are copied to the prompt cache when a request starts."""
    cache_ram_tokens: int | None = None
    """``--cache-ram`` in tokens: the bound of the prompt cache. None: no bound. 0: no prompt cache."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MOST_SLOTS:
            raise InputError(f"--slots: {self.slots}; expected 1 to {MOST_SLOTS}")
        if not 0.0 <= self.slot_prompt_similarity <= 1.0:
            raise InputError(f"--slot-prompt-similarity: {self.slot_prompt_similarity:g}; expected 0 to 1")
        if self.cache_ram_tokens is not None and self.cache_ram_tokens < 0:
            raise InputError(f"--cache-ram-tokens: {self.cache_ram_tokens}; expected 0 or more tokens")

    @property
    def saves_idle_slots(self) -> bool:
        """True if a request's start copies idle slots to the prompt cache; off without a prompt cache."""
        return self.cache_idle_slots and self.cache_ram_tokens != 0


def slot_config(arguments: argparse.Namespace, engine: Engine | None) -> SlotConfig:
    """Return llama.cpp's settings from flags; default number of slots from the trace's header. Raises InputError."""
    settings = {name: getattr(arguments, name) for name in SlotConfig.__dataclass_fields__}
    if settings["slots"] is None and engine is not None and engine.name == "llamacpp":
        settings["slots"] = engine.max_num_seqs
    return SlotConfig(**{name: value for name, value in settings.items() if value is not None})


def add_slot_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``SlotConfig``."""
    group = parser.add_argument_group("llama.cpp", "with --engine llamacpp")
    group.add_argument("--slots", type=int, help="slots, the server's --parallel (default: the trace's, else 4)")
    group.add_argument(
        "--slot-prompt-similarity",
        type=float,
        metavar="S",
        help="share of a prompt that a slot must have cached (default 0.1)",
    )
    group.add_argument(
        "--kv-unified",
        action=argparse.BooleanOptionalAction,
        help="one KV buffer (default: on; a server with --parallel: off)",
    )
    group.add_argument(
        "--cache-idle-slots",
        action=argparse.BooleanOptionalAction,
        help="save idle slots at a request's start (default: on)",
    )
    group.add_argument("--cache-ram-tokens", type=int, help="size of the prompt cache, in tokens (default: unlimited)")
