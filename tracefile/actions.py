"""Work of ``tracefile``'s actions: each reads a trace, and prints or writes."""

import json
import sys
from itertools import islice

from rich.table import Table
from rich.text import Text

from tracefile.commandline.console import CommandConsole
from tracefile.commandline.printing import printable
from tracefile.config import Config
from tracefile.conversion import convert_traces
from tracefile.files.reading import open_trace
from tracefile.records.encoding import encode_meta, encode_record, meta_object
from tracefile.records.errors import USAGE_ADVICE, InputError
from tracefile.records.reader import TraceReader
from tracefile.records.schema import Meta
from tracefile.study.checking import check_trace
from tracefile.study.summary import Summary, share, summarise, summary_object

FINDINGS_SHOWN = 100


def run_action(config: Config) -> int:
    """Do what the flags ask; 1 if ``check`` found a broken rule."""
    if config.action == "convert":
        return convert_traces(config)
    actions = {"info": show_info, "check": show_check, "cat": print_lines}
    with open_trace(config.trace) as reader:
        code = actions[config.action](config, reader)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
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
        "requests without": _missing(summary),
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


def _missing(summary: Summary) -> str:
    """Shares of requests that lack a fact; all but hashes are expected of completed requests alone."""
    completed = summary.statuses["ok"]
    facts = {
        "block hashes": (summary.without_hashes, summary.records),
        "usage": (summary.without_usage, completed),
        "cached tokens": (summary.without_cached_tokens, completed),
        "token times (not streamed)": (summary.without_token_times, completed),
    }
    return ", ".join(f"{name} {lack:,} ({_percent(lack, of)})" for name, (lack, of) in facts.items() if lack) or "none"


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
