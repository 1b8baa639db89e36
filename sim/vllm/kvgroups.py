"""KV cache groups of a hybrid model: kinds, block sizes, and the prompt lengths at which a prefix hit may end.

All layers of a group share a block table. All groups allocate from one block pool: blocks have equal bytes, and their
tokens differ by group.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from engines.modelconfig import kv_groups
from tracefile.records.errors import InputError
from tracefile.records.schema import MOST_TOKENS

Kind = Literal["full", "mla", "window", "chunk", "mamba", "mamba2"]
"""``full``, ``mla``: attention to every earlier token. ``window``: to the last tokens. ``chunk``: to tokens of the
current chunk. ``mamba``: a state, stored where a scheduler step ends. ``mamba2``: the kernel also stores it inside a
step."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_STATE: Final = ("mamba", "mamba2")
_GROUP: Final = re.compile(r"(\w+)(?:\(([\w/]*)\))?:(\d+)(?:\*(\d+))?")
MOST_GROUPS: Final = 1000
GRAMMAR: Final = "full:16+window(1024):16*3, for example"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """KV cache group: layers with one block layout; equal groups share a prefix lookup."""

    kind: Kind
    block_size: int
    span: int = 0
    """Tokens of the window or the chunk."""
    draft: bool = field(default=False, compare=False)
    """Layers of the draft model: a prefix hit drops its last block."""

    @property
    def sees_all(self) -> bool:
        return self.kind in ("full", "mla")

    @property
    def keeps_state(self) -> bool:
        return self.kind in _STATE

    @property
    def name(self) -> str:
        inside = [str(self.span)] * (self.span > 0) + ["draft"] * self.draft
        return f"{self.kind}{'(' + '/'.join(inside) + ')' if inside else ''}:{self.block_size}"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV cache groups of an engine. Raises InputError for groups that vLLM refuses."""

    groups: tuple[KvGroup, ...]
    match: int | None = None
    """vLLM's ``--prefix-match-unit``; None: the greatest common divisor of all block sizes."""
    retain: int | None = 0
    """vLLM's ``--prefix-cache-retention-interval`` of windows and states, in tokens. 0: only at the end of a prompt or
    of a shared prefix; None: everywhere."""
    eagle: bool = False
    """Speculative decoding drops the last block of a prefix hit: in the draft model's groups, or in all groups."""

    def __post_init__(self) -> None:
        cached = [group.block_size for group in self.groups]
        unit, block = self.match_unit, self.block_size
        if any(size % unit for size in cached) or (len(self.groups) == 1 and unit != block):
            raise InputError(f"kv_groups: match={unit}: does not divide blocks of {cached}; expected a divisor of all")
        sparse = any(group.keeps_state or group.kind == "window" for group in self.groups)
        if self.retain and (not sparse or self.retain % block):
            raise InputError(
                f"kv_groups: retain={self.retain}; expected 0, none, or a multiple of {block} with a window or mamba"
            )
        for index, group in enumerate(self.groups):
            if group.kind == "chunk" and (group.block_size != self.alignment or index in self.dropping):
                raise InputError(
                    f"kv_groups: {group.name}: expected blocks of {self.alignment} tokens as in all groups, no eagle"
                )

    @property
    def match_unit(self) -> int:
        """Tokens between two block hashes."""
        return self.match or math.gcd(*(group.block_size for group in self.groups))

    @property
    def block_size(self) -> int:
        """Least common multiple of all block sizes, in tokens."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def partial_hits(self) -> bool:
        """True if a prefix hit may end inside a block: states are finer than blocks, and all groups support it."""
        unit = self.match_unit
        fits = all(group.sees_all or group.keeps_state or group.block_size == unit for group in self.groups)
        states = (group.block_size > unit for group in self.groups if group.keeps_state)
        return len(self.groups) > 1 and fits and any(states)

    @property
    def alignment(self) -> int:
        """Granularity of a prefix hit, in tokens."""
        return self.match_unit if self.partial_hits else self.block_size

    @property
    def dropping(self) -> frozenset[int]:
        """Indices of the groups that drop the last block of a prefix hit."""
        drafts = [group for group in self.groups if group.draft] or [group for group in self.groups if self.eagle]
        return frozenset(index for index, group in enumerate(self.groups) if group in drafts)

    @property
    def name(self) -> str:
        names = [group.name for group in self.groups]
        counted = [f"{name}*{names.count(name)}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
        counted += [f"match={self.match}"] * (self.match is not None) + ["eagle"] * self.eagle
        return "+".join(
            [*counted, *([f"retain={'none' if self.retain is None else self.retain}"] * (self.retain != 0))]
        )


def read_groups(text: str) -> KvLayout:
    """Read KV cache groups from text, or from a model's ``config.json`` or its folder. Raises InputError."""
    path, _, words = text.partition(".json+")
    is_path = text.endswith(".json") or bool(words) or Path(text).is_dir()
    if not is_path:
        return parse_groups(text)
    layout = kv_groups(Path(f"{path}.json" if words else text))
    return parse_groups(f"{layout}+{words}" if words else layout)


def parse_groups(text: str) -> KvLayout:
    """Parse KV cache groups, ``full:16+window(1024):16*3+match=16+retain=none+eagle``. Raises InputError."""
    groups: list[KvGroup] = []
    match, retain, eagle = None, 0, False
    retained: int | None = retain
    for word in text.replace(" ", "").split("+"):
        name, _, value = word.partition("=")
        if word == "eagle":
            eagle = True
        elif name == "match" and value.isdecimal() and int(value):
            match = int(value)
        elif name == "retain" and (value == "none" or value.isdecimal()):
            retained = None if value == "none" else int(value)
        else:
            groups += _parse_group(word)
    if not groups:
        raise InputError(f"kv_groups: {text!r}; expected {GRAMMAR}")
    return KvLayout(tuple(groups), match, retained, eagle)


def _parse_group(word: str) -> list[KvGroup]:
    match = _GROUP.fullmatch(word)
    kind = next((name for name in KINDS if match and match[1] == name), None)
    inside = [word for word in (match[2] or "").split("/") if word] if match else []
    spans = [int(word) for word in inside if word.isdecimal()]
    draft = "draft" in inside
    needs_span = kind in ("window", "chunk")
    if match is None or kind is None or len(spans) + draft != len(inside) or len(spans) != needs_span:
        raise InputError(f"kv_groups: {word!r}; expected {GRAMMAR}; kinds: {', '.join(KINDS)}")
    if not int(match[3]) or 0 in spans or match[4] == "0":
        raise InputError(f"kv_groups: {word!r}; expected positive numbers of tokens and groups")
    if max(int(match[3]), *spans, 0) > MOST_TOKENS or int(match[4] or 1) > MOST_GROUPS:
        raise InputError(f"kv_groups: {word!r}; expected at most {MOST_TOKENS} tokens and {MOST_GROUPS} groups")
    return [KvGroup(kind, int(match[3]), sum(spans), draft)] * int(match[4] or 1)
