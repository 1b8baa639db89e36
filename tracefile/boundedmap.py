"""A map that forgets what was not touched for long, so that an index over endless traffic stays bounded."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedMap(Generic[Key, Value]):
    """At most ``limit`` entries in two generations; when the young one is half of that, the old one is dropped.

    Whatever was touched within the last ``limit`` / 2 distinct touches is certainly there. Every operation is O(1),
    where an exact LRU in a dict pays for finding its oldest entry or for links in every one.
    """

    __slots__ = ("_old", "_young", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: Key) -> Value | None:
        """The value, its age left as it is; None if there is none."""
        return self._young[key] if key in self._young else self._old.get(key)

    def touch(self, key: Key, default: Value) -> Value:
        """The value, now among the youngest; ``default`` is stored if there was none."""
        if key in self._young:
            return self._young[key]
        value = self._old.pop(key, default)
        self[key] = value
        return value

    def touch_all(self, keys: Sequence[Key], default: Value) -> list[tuple[int, Value]]:
        """``touch`` each key in turn; where a value other than ``default`` was there, and which."""
        young, old = self._young, self._old
        found = []
        for at, key in enumerate(keys):
            if key in young:
                value = young[key]
            else:
                value = young[key] = old.pop(key, default)
                if 2 * len(young) >= self.limit:
                    young, old = self._young, self._old = {}, young
            if value is not default:
                found.append((at, value))
        return found

    def __setitem__(self, key: Key, value: Value) -> None:
        self._old.pop(key, None)
        self._young[key] = value
        if 2 * len(self._young) >= self.limit:
            self._old, self._young = self._young, {}

    def values(self) -> Iterator[Value]:
        return chain(self._old.values(), self._young.values())

    def check_integrity(self) -> None:
        assert len(self) <= self.limit, (len(self), self.limit)
        assert not self._young.keys() & self._old.keys()
