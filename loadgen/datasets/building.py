"""``loadgen build-dataset``: a dataset's sessions cut once, for runs that start at once and need no tokenizer.

A dataset with texts becomes one object ``{"conversations": [[{"messages": [...]}, …], …]}``, which ``swe-smith:`` (and
evalscope's ``swe_smith``) reads; one with lengths, such as any trace, becomes rows of a trie workload.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.lengths import parse_tokens
from loadgen.datasets import DATASETS, parse_dataset
from loadgen.datasets.rows import rows
from loadgen.datasets.session import ESTIMATED, DatasetOptions, DatasetSession, TokenizerLengths
from loadgen.datasets.swesmith import row_sessions
from loadgen.text.tokenizer import LocalTokenizer
from tracefile import InputError
from tracefile.commandline.parser import Parser, seed
from tracefile.commandline.progress import counted
from tracefile.files.writing import write_lines
from tracefile.importers.trie import TrieTurn, trie_row
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    import multiprocessing
    from concurrent import futures
else:  # which the flags need not
    multiprocessing, futures = LateModule("multiprocessing"), LateModule("concurrent.futures")

EPILOG = "examples:\n  loadgen build-dataset swe-smith:trajectories.jsonl --number 64 -o sessions.jsonl.zst\n"
DEFAULT_NUMBER = 128
ROWS_A_TASK = 8

Row = tuple[int, str, bytes]
"""Number in its file, place for errors, JSON text."""


def parser() -> Parser:
    description = __doc__.partition("\n")[0].partition(": ")[2]
    made = Parser(prog="loadgen build-dataset", description=description, epilog=EPILOG)
    made.add_argument("dataset", metavar="NAME:PATH", help="swe-smith's trajectories, or a dataset of lengths")
    made.add_argument(
        "-o", "--output", required=True, metavar="OUT", help="file of the sessions; .gz and .zst compress"
    )
    made.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    made.add_argument("--number", type=int, help=f"sessions (default: texts {DEFAULT_NUMBER}, lengths all)")
    made.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer that counts tokens (default: 4 bytes a token)"
    )
    made.add_argument("--first-turn-length", metavar="N", help="swe-smith: tokens of the first turn (default 65000)")
    made.add_argument("--subsequent-turn-length", metavar="N", help="swe-smith: tokens of later turns (default 500)")
    made.add_argument("--min-turns", type=int, help="fewest turns of a session (default 1)")
    made.add_argument("--max-turns", type=int, help="most turns; swe-smith draws between the two")
    made.add_argument("--seed", type=seed, default=0, help="seed of drawn lengths and turns")
    made.add_argument("--workers", type=int, default=1, help="processes that count tokens")
    return made


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    name, path = parse_dataset(args.dataset)
    if path is None:
        raise InputError(f"--dataset: {name}: drawn by its flags at every run; expected a dataset with a file")
    for flag, value in (("--number", args.number), ("--workers", args.workers), ("--min-turns", args.min_turns)):
        if value is not None and value < 1:
            raise InputError(f"{flag} {value}; expected 1 or more")
    has_texts = DATASETS[name].has_texts
    if has_texts and not DATASETS[name].cuts_turns:
        raise InputError(f"--dataset: {name}: texts are read as they are; expected swe-smith, or a dataset of lengths")
    lines = _conversations(args, path) if has_texts else _workload(args, name, path)
    write_lines(args.output, lines, inputs=[path], overwrite=args.overwrite)
    return 0


def _conversations(args: Namespace, path: Path) -> Iterator[bytes]:
    """Yield an object of enough trajectories' sessions, in the file's order, however many workers there are."""
    number = args.number or DEFAULT_NUMBER
    sessions = _sessions(args.tokenizer, _options(args), path, args.workers)
    found = list(islice(counted(sessions, "sessions"), number))
    if len(found) < number:
        raise InputError(f"{path}: {len(found)} sessions of that length; expected {number}, or a smaller --number")
    turns = [[{"messages": [quoted.message for quoted in turn.quoted]} for turn in session] for session in found]
    yield msgspec.json.encode({"conversations": turns}) + b"\n"


def _workload(args: Namespace, name: str, path: Path) -> Iterator[bytes]:
    options = _counted_by(args.tokenizer, _options(args))
    sessions = (
        session[: args.max_turns]
        for session in DATASETS[name].read(path, options)
        if len(session) >= (args.min_turns or 1)
    )
    for session in islice(counted(sessions, "sessions"), args.number):
        row = trie_row([TrieTurn(turn.new_tokens or 1, turn.output_tokens or 1, turn.think_ms) for turn in session])
        yield msgspec.json.encode(row) + b"\n"


def _options(args: Namespace) -> DatasetOptions:
    return DatasetOptions(
        lengths=ESTIMATED,
        counts_outputs=False,
        seed=args.seed,
        min_turns=args.min_turns,
        max_turns=args.max_turns,
        first_turn_tokens=parse_tokens("--first-turn-length", args.first_turn_length),
        subsequent_turn_tokens=parse_tokens("--subsequent-turn-length", args.subsequent_turn_length),
    )


def _counted_by(tokenizer: Path | None, options: DatasetOptions) -> DatasetOptions:
    return options if tokenizer is None else replace(options, lengths=_tokenizer(tokenizer))


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> TokenizerLengths:
    return TokenizerLengths(LocalTokenizer(path))


def _sessions(tokenizer: Path | None, options: DatasetOptions, path: Path, workers: int) -> Iterator[DatasetSession]:
    numbered = ((index, where, row) for index, (where, row) in enumerate(rows(path)))
    if workers == 1:
        options = _counted_by(tokenizer, options)
        yield from chain.from_iterable(row_sessions(row, where, options, index) for index, where, row in numbered)
        return
    # Not forked: a tokenizer's threads do not survive it.
    with futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while task := list(islice(numbered, 2 * workers * ROWS_A_TASK)):
            parts = [task[at : at + ROWS_A_TASK] for at in range(0, len(task), ROWS_A_TASK)]
            for done in [pool.submit(_task, tokenizer, options, part) for part in parts]:
                yield from done.result()


def _task(tokenizer: Path | None, options: DatasetOptions, task: Sequence[Row]) -> list[DatasetSession]:
    """Return the sessions of some rows; the tokenizer is loaded in this process."""
    options = _counted_by(tokenizer, options)
    return [session for index, where, row in task for session in row_sessions(row, where, options, index)]
