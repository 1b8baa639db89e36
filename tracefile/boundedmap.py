"""LRU map: an index over endless traffic in bounded memory."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedMap(Generic[Key, Value]):
    """At most ``limit`` entries; the least recently touched entry is evicted. Every operation is O(1)."""

    __slots__ = ("_entries", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        """Most recently touched last."""

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """Return the value without touching it; None if the key is absent."""
        return self._entries.get(key)

    def touch(self, key: Key, default: Value) -> Value:
        """Return the value and make it the most recent; store ``default`` if the key is absent."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        self[key] = default
        return default

    def touch_all(self, keys: Sequence[Key], default: Value) -> list[tuple[int, Value]]:
        """``touch`` each key in turn; return the indices and values of keys that had a value other than ``default``."""
        entries, present = self._entries, []
        for index, key in enumerate(keys):
            value = entries.setdefault(key, default)
            entries.move_to_end(key)
            if value is not default:
                present.append((index, value))
        while len(entries) > self.limit:
            entries.popitem(last=False)
        return present

    def __setitem__(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self.limit:
            self._entries.popitem(last=False)

    def values(self) -> Iterator[Value]:
        return iter(self._entries.values())

    def check_integrity(self) -> None:
        assert len(self) <= self.limit, (len(self), self.limit)
