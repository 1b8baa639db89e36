"""``tracefile``: inspect, check, convert, cut, join and scale traces."""

import tracefile.interrupt  # noqa: F401 - before all else: Ctrl-C while the rest is imported  # isort: skip

import json
import sys
from collections.abc import Sequence
from itertools import islice

from rich.table import Table
from rich.text import Text

from tracefile.commandline.console import CommandConsole
from tracefile.commandline.ending import run_command
from tracefile.commandline.printing import printable
<<<<<<< HEAD
from tracefile.commandline.progress import counted
from tracefile.files.digest import trace_digest
from tracefile.files.reading import check_continues, open_trace
from tracefile.files.writing import new_writer
from tracefile.hashing.tokenchains import Resizing, branches_of, is_finer
=======
from tracefile.config import Config, parse_config
from tracefile.files.reading import open_trace
>>>>>>> b7a877b (Add six formats to read, nine to write, and cut, anonymize, align and mean sessions of traces)
from tracefile.records.encoding import encode_meta, encode_record, meta_object
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import Meta
from tracefile.rewriting import (
    anonymize_trace,
    convert_trace,
    cut_trace,
    join_traces,
    synthesize_trace,
    warn,
)
from tracefile.study.checking import check_trace
from tracefile.study.summary import Summary, share, summarise, summary_object

FINDINGS_SHOWN = 100
<<<<<<< HEAD
OUTPUT_HELP = "a .gz or .zst suffix compresses, .parquet makes columns"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of one call of the command."""

    action: Literal["info", "check", "cat", "convert", "join", "synthesize"]
    trace: str = ""
    traces: tuple[str, ...] = ()
    """Traces of ``join``, in order."""
    as_json: bool = False
    output: str | None = None
    overwrite: bool = False
    sessions: bool = False
    block_size: int | None = None
    """Of the hashes that ``convert`` writes; null: the trace's."""
    scale: float = 1.0
    spread: float = 1.0
    seed: int = 0
    head: int | None = None
    """Records that ``cat`` prints; null: all."""


def parse_config(argv: Sequence[str]) -> Config:
    """Return the command line as a Config."""
    parser = Parser(prog="tracefile", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    info = actions.add_parser("info", help="summarise a trace: counts, time span, sessions, shared prefixes")
    info.add_argument(
        "trace",
        metavar="TRACE",
        help="a kvtape, Mooncake, Bailian, BurstGPT, Azure or vllm-vcr trace; plain, .gz or .zst, or .parquet",
    )
    info.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object instead of tables")
    check = actions.add_parser(
        "check", help="check a trace against the schema; exit 1 and list the lines that break a rule"
    )
    check.add_argument("trace", metavar="TRACE")
    cat = actions.add_parser("cat", help="print a trace as JSON Lines")
    cat.add_argument("trace", metavar="TRACE")
    cat.add_argument("--head", type=int, metavar="N", help="print the first N records only")
    convert = actions.add_parser("convert", help="write a trace of any known format in this schema")
    convert.add_argument("trace", metavar="IN")
    convert.add_argument("output", metavar="OUT", help=OUTPUT_HELP)
    convert.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    convert.add_argument(
        "--sessions", action="store_true", help="infer sessions from shared prefixes for records without one"
    )
    convert.add_argument(
        "--block-size",
        type=int,
        metavar="N",
        help="tokens in a block: a multiple of the trace's, or a divisor if it tells to the token where prompts part",
    )
    join = actions.add_parser("join", help="write a trace that is in segments, or in several files, as one file")
    join.add_argument("traces", metavar="TRACE", nargs="+", help="a folder of segments, a manifest, or files in order")
    join.add_argument("-o", "--output", required=True, metavar="OUT", help=OUTPUT_HELP)
    join.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    synthesis = actions.add_parser("synthesize", help="scale a trace: more, or less, of the same traffic")
    synthesis.add_argument("trace", metavar="TRACE")
    synthesis.add_argument(
        "--scale", type=float, required=True, metavar="X", help="conversations to write, as a multiple of the trace's"
    )
    synthesis.add_argument(
        "--spread",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the added conversations that get new prefixes; the rest reuse existing ones (default 1)",
    )
    synthesis.add_argument("--seed", type=int, default=0, help="seed of draws and new hashes (default 0)")
    synthesis.add_argument(
        "-o", "--output", default="/dev/stdout", metavar="OUT", help=f"default stdout; {OUTPUT_HELP}"
    )
    synthesis.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    return Config(**vars(parser.parse_args(argv)))
=======
>>>>>>> b7a877b (Add six formats to read, nine to write, and cut, anonymize, align and mean sessions of traces)


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 if ``check`` found a broken rule."""
    config = parse_config(argv)
    if config.action == "join":
        return join_traces(config)
    actions = {
        "info": show_info,
        "check": show_check,
        "cat": print_lines,
        "convert": convert_trace,
        "cut": cut_trace,
        "anonymize": anonymize_trace,
        "synthesize": synthesize_trace,
    }
    with open_trace(config.trace) as reader:
        code = actions[config.action](config, reader)
        warn(reader)
    return code


def show_info(config: Config, reader: TraceReader) -> int:
    """Print the summary as tables or as JSON."""
    summary = summarise(reader)
    if config.as_json:
        print(json.dumps(summary_object(reader, summary)))
    else:
        console = CommandConsole(sys.stdout)
        console.print(counts_table(reader, summary))
        console.print(meta_table(reader))
    return 0


def show_check(config: Config, reader: TraceReader) -> int:
    """Print the lines that break a rule, the first hundred in full; 1 if there are any."""
    count = 0
    for finding in check_trace(reader):
        count += 1
        if count <= FINDINGS_SHOWN:
            print(f"{reader.where(finding.line)}: {finding.field}: {finding.what}")
    if count > FINDINGS_SHOWN:
        print(f"… and {count - FINDINGS_SHOWN} more")
    print(f"{reader.path}: {count or 'no'} finding{'' if count == 1 else 's'}", file=sys.stderr)
    return 1 if count else 0


def print_lines(config: Config, reader: TraceReader) -> int:
    """Print headers and records as lines of JSON."""
    if config.head is not None and config.head < 0:
        raise InputError(f"--head: {config.head}; expected 0 or more")
    sys.stdout.write(encode_meta(meta := reader.meta).decode())
    for record in islice(reader, config.head):
        if reader.latest_meta != meta:
            sys.stdout.write(encode_meta(meta := reader.latest_meta).decode())
        sys.stdout.write(encode_record(record).decode())
    return 0


<<<<<<< HEAD
def convert_trace(config: Config, reader: TraceReader) -> int:
    """Copy record by record; constant memory, but for the session index's bounded one."""
    assert config.output is not None
    index = SessionIndex(reader.meta.block_size or 1) if config.sessions else None
    later_turns = 0
    resizing = None if config.block_size is None else resizing_of(config.block_size, reader)
    meta_of = (lambda meta: meta) if resizing is None else resizing.meta
    with new_writer(config.output, meta_of(reader.meta), inputs=[config.trace], overwrite=config.overwrite) as writer:
        for record in counted(reader, "records converted"):
            writer.change_meta(meta_of(reader.latest_meta))
            linked = index.link(record) if index else record
            linked = linked if resizing is None else resizing.record(linked)
            later_turns += (linked.turn or 1) > 1
            writer.write(linked)
    print(f"{config.output}: {writer.count} records", file=sys.stderr)
    if index:
        told = f"{later_turns:,} later turns of sessions" if later_turns else NO_CHAINS
        print(f"{config.output}: {told}", file=sys.stderr)
    return 0


def resizing_of(block_size: int, reader: TraceReader) -> Resizing:
    """Return the conversion to another block size; a finer one reads the trace's branches first."""
    if block_size < 1:
        raise InputError(f"--block-size: {block_size}; expected 1 or more")
    branches = None
    if is_finer(block_size, reader.meta, reader.path):
        with open_trace(reader.path) as whole:
            branches = branches_of(whole, reader.meta.block_size or 1)
    return Resizing(reader.meta, block_size, branches)


def synthesize_trace(config: Config, reader: TraceReader) -> int:
    """Scale the trace; only it and the conversations that have turns to come are in memory."""
    assert config.output is not None
    scale = Scale(times=config.scale, spread=config.spread, seed=config.seed)
    source = Source(counted(reader, "records read"), config.trace)
    header = synthetic_meta(reader.meta, trace_digest(config.trace), scale)
    with new_writer(config.output, header, inputs=[config.trace], overwrite=config.overwrite) as writer:
        for record in counted(synthesize(source, scale), "records made"):
            writer.write(record)
    print(f"{config.output}: {writer.count} records", file=sys.stderr)
    return 0


def join_traces(config: Config) -> int:
    """Copy the records of one trace after another; a header is written again where it says something new."""
    assert config.output is not None
    metas = [_first_meta(trace) for trace in config.traces]
    for trace, meta in zip(config.traces, metas, strict=True):
        check_continues(metas[0], meta, trace)
    with new_writer(config.output, metas[0], inputs=config.traces, overwrite=config.overwrite) as writer:
        for trace in config.traces:
            with open_trace(trace) as reader:
                for record in counted(reader, "records joined"):
                    writer.change_meta(reader.latest_meta)
                    writer.write(record)
                _warn(reader)
    print(f"{config.output}: {writer.count} records", file=sys.stderr)
    return 0


=======
>>>>>>> b7a877b (Add six formats to read, nine to write, and cut, anonymize, align and mean sessions of traces)
def counts_table(reader: TraceReader, summary: Summary) -> Table:
    """Table of the summary."""
    table = Table(title=Text(printable(f"{reader.path} ({reader.format})")), show_header=False, title_justify="left")
    rows = {
        "records": f"{summary.records:,}",
        "span": _span(summary),
        "status": _counted(summary.statuses),
        "endpoints": _counted(summary.endpoints),
        "prompt / output tokens": f"{summary.prompt_tokens:,} / {summary.output_tokens:,}",
        "prompt ids": _prompt_ids(summary),
        "cached tokens": _cached(reader.meta, summary),
        "hashed": f"{_percent(summary.hashed_tokens, summary.prompt_tokens)} of prompt tokens, "
        f"{summary.distinct_blocks:,} distinct blocks",
        "hit potential": f"{_percent(summary.hit_tokens, summary.prompt_tokens)} of prompt tokens "
        f"({summary.hit_tokens:,}; unlimited cache, blocks of {reader.meta.block_size or '–'} tokens)",
        "sessions": f"{summary.named_sessions:,} named by clients, {summary.inferred_sessions:,} inferred; "
        f"{summary.later_turns:,} later turns",
    }
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    return table


def _cached(meta: Meta, summary: Summary) -> str:
    if not summary.cached_reported:
        return "reported by no record" + ("" if meta.source is None else f"; {USAGE_ADVICE}")
    return f"{summary.cached_tokens:,} (reported by {summary.cached_reported:,} records)"


def meta_table(reader: TraceReader) -> Table:
    """Table of the header."""
    table = Table(title="meta", show_header=False, title_justify="left")
    for name, value in meta_object(reader.meta).items():
        table.add_row(Text(printable(name)), Text(printable(value if isinstance(value, str) else json.dumps(value))))
    return table


def _span(summary: Summary) -> str:
    if summary.first_arrival_ms is None or summary.last_end_ms is None:
        return "unknown"
    return f"{(summary.last_end_ms - summary.first_arrival_ms) / 1000:,.1f} s"


def _prompt_ids(summary: Summary) -> str:
    """Share of records whose hashed ids are as many as the engine counted; by endpoint if it is not all."""
    checked, wrong = summary.prompt_counts, summary.prompt_mismatches
    if not checked.total():
        return "not checked: no record has both ids and the engine's count"
    said = f"as many as the engine counted in {_percent(checked.total() - wrong.total(), checked.total())} of "
    shares = (f"{name} {_percent(count - wrong[name], count)}" for name, count in sorted(checked.items()))
    reason = f" ({', '.join(shares)}); the others' hashes are not the engine's blocks" if wrong.total() else ""
    return f"{said}{checked.total():,} records{reason}"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _percent(part: int, whole: int) -> str:
    found = share(part, whole)
    return "–" if found is None else f"{found:.1%}"


def command() -> None:
    """The ``tracefile`` command."""
    run_command("tracefile", main)


if __name__ == "__main__":
    command()
