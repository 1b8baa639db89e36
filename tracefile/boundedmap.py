"""A map that forgets what was not touched for long, so that an index over endless traffic stays bounded."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedMap(Generic[Key, Value]):
    """At most ``limit`` entries; the one that was touched the longest ago goes first. Every operation is O(1)."""

    __slots__ = ("_entries", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        """The last touched at the end."""

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """Return the value, its age left as it is; None if there is none."""
        return self._entries.get(key)

    def touch(self, key: Key, default: Value) -> Value:
        """Return the value, now the youngest; ``default`` is stored if there was none."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        self[key] = default
        return default

    def touch_all(self, keys: Sequence[Key], default: Value) -> list[tuple[int, Value]]:
        """``touch`` each key in turn; return where a value other than ``default`` was there, and which."""
        entries, known = self._entries, []
        for index, key in enumerate(keys):
            value = entries.setdefault(key, default)
            entries.move_to_end(key)
            if value is not default:
                known.append((index, value))
        while len(entries) > self.limit:
            entries.popitem(last=False)
        return known

    def __setitem__(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)

    def values(self) -> Iterator[Value]:
        return iter(self._entries.values())

    def check_integrity(self) -> None:
        assert len(self) <= self.limit, (len(self), self.limit)
