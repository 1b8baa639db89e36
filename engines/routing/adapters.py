"""LoRA adapters resident on an engine: its own books in simulation, a router's guess of them elsewhere."""

from collections.abc import Collection


class AdapterSlots:
    """The ``count`` adapters used last; a use of another one loads it in place of the longest unused."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._used: dict[str, None] = {}
        """Longest unused first."""

    @property
    def resident(self) -> Collection[str]:
        return self._used.keys()

    def use(self, adapter: str) -> bool:
        """Use an adapter; return whether it was resident."""
        was_resident = adapter in self._used
        self._used.pop(adapter, None)
        self._used[adapter] = None
        if len(self._used) > self._count:
            del self._used[next(iter(self._used))]
        return was_resident

    def clear(self) -> None:
        self._used.clear()
