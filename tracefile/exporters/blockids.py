"""Block ids of a prompt as others write them: small numbers, one for every started block, equal for equal prefixes."""

from tracefile.importers.blocktraces import PARTIAL_BLOCK
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record


class BlockIds:
    """Numbers of a trace's blocks in order of first use.

    A block whose hash is unknown gets a number of its own: it is shared with none. So does a partial last block,
    unless the trace was imported with its id.
    """

    def __init__(self, meta: Meta, where: str) -> None:
        if meta.block_size is None:
            raise InputError(
                f"{where}: meta.block_size: missing; expected a trace with block hashes, or --to trie, "
                "aiperf-mooncake, otlp or vllm-vcr, which need none"
            )
        self.block_size = meta.block_size
        self._numbers: dict[int, int] = {}
        self._partial: dict[int, int] = {}
        self._next = 0

    def of(self, record: Record) -> list[int]:
        """Ids of a record's prompt, as many as it has started blocks."""
        full, rest = divmod(record.prompt_tokens or 0, self.block_size)
        known = (record.block_hashes or [])[: record.hashable_blocks]
        ids = [self._numbered(self._numbers, block) for block in known[:full]]
        ids += [self._fresh() for _ in range(full - len(ids))]
        if rest:
            partial = record.extra.get(PARTIAL_BLOCK)
            ids.append(self._numbered(self._partial, partial) if isinstance(partial, int) else self._fresh())
        return ids

    def _numbered(self, numbers: dict[int, int], block: int) -> int:
        number = numbers.get(block)
        if number is None:
            number = numbers[block] = self._fresh()
        return number

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1
