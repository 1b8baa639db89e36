"""Which requests of a trace must be sent by the same process: those whose prompts rest on one another's answers.

A session's turns wait for one another, and a block that was generated in the capture stands for the tokens that are
generated now: whoever makes it and whoever carries it belong together. All else is a fixed function of a hash and the
nonce, the same in every process, so it may be shared across them freely.
"""

from collections.abc import Callable, Iterable, Mapping

from tracefile import BlockHash, Record, RequestId


class Groups:
    """Disjoint sets that grow together, by number."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def add(self) -> int:
        """A new set."""
        self._parents.append(len(self._parents))
        return len(self._parents) - 1

    def find(self, item: int) -> int:
        """The least member of the item's set."""
        while self._parents[item] != item:
            self._parents[item] = self._parents[self._parents[item]]
            item = self._parents[item]
        return item

    def join(self, one: int, other: int) -> None:
        """Make two sets one."""
        low, high = sorted((self.find(one), self.find(other)))
        self._parents[high] = low


def group_requests(read: Callable[[], Iterable[Record]], *, splice: bool) -> Mapping[RequestId, int]:
    """Every request's group, numbered from 0 in the order of the groups' first records.

    ``read`` gives the records, once to learn who belongs to which session and once more to learn, with ``splice``, who
    carries blocks that others generated; none is kept.
    """
    groups = Groups()
    items: dict[RequestId, int] = {}
    names: dict[str, int] = {}
    makers: dict[BlockHash, int] = {}
    for record in read():
        item = items[record.request_id] = groups.add()
        for name in _names(record):
            groups.join(names.setdefault(name, item), item)
        for block in (record.output_block_hashes or ()) if splice else ():
            groups.join(makers.setdefault(block, item), item)
    if makers:
        for record in read():
            _bind_carrier(groups, items[record.request_id], record, makers)
    numbers: dict[int, int] = {}
    return {request_id: numbers.setdefault(groups.find(item), len(numbers)) for request_id, item in items.items()}


def _names(record: Record) -> list[str]:
    """What binds a request to others: itself (for its children), its parent and its session."""
    names = [f"request {record.request_id}"]
    if record.parent_id is not None:
        names.append(f"request {record.parent_id}")
    if record.session_id is not None:
        names.append(f"session {record.session_id}")
    return names


def _bind_carrier(groups: Groups, item: int, record: Record, makers: Mapping[BlockHash, int]) -> None:
    """Join a request with whoever generated a block of its prompt."""
    for block in record.block_hashes or ():
        maker = makers.get(block)
        if maker is not None:
            groups.join(maker, item)
