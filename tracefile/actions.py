"""Actions of ``tracefile``: info, check, cat and convert."""

import sys
from itertools import islice

from tracefile.analysis.checking import check_trace
from tracefile.analysis.summary import summarise, summary_lines, summary_object
from tracefile.commandline.printing import print_result
from tracefile.config import Config
from tracefile.conversion import convert_traces
from tracefile.files.reading import TraceReader, open_trace
from tracefile.records.encoding import encode_meta, encode_record
from tracefile.records.errors import InputError

FINDINGS_SHOWN = 100


def run_action(config: Config) -> int:
    """Run an action; exit code 1 if ``check`` finds a violation of the schema."""
    if config.action == "convert":
        return convert_traces(config)
    actions = {"info": show_info, "check": show_check, "cat": print_lines}
    with open_trace(config.trace) as reader:
        code = actions[config.action](config, reader)
        for warning in reader.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return code


def show_info(config: Config, reader: TraceReader) -> int:
    """Print request, token and block counts of a trace as lines or as JSON."""
    summary = summarise(reader)
    lines = () if config.as_json else summary_lines(reader, summary)
    print_result(summary_object(reader, summary), lines, as_json=config.as_json)
    return 0


def show_check(config: Config, reader: TraceReader) -> int:
    """Print violations of the schema, at most ``FINDINGS_SHOWN`` in full; exit code 1 if there are any."""
    count = 0
    for finding in check_trace(reader):
        count += 1
        if count <= FINDINGS_SHOWN:
            print(f"{reader.where(finding.line)}: {finding.field}: {finding.problem}")
    if count > FINDINGS_SHOWN:
        print(f"… and {count - FINDINGS_SHOWN} more")
    print(f"{reader.path}: {count or 'no'} finding{'' if count == 1 else 's'}", file=sys.stderr)
    return 1 if count else 0


def print_lines(config: Config, reader: TraceReader) -> int:
    """Print headers and records as JSON Lines."""
    if config.head is not None and config.head < 0:
        raise InputError(f"--head: {config.head}; expected 0 or more")
    sys.stdout.write(encode_meta(meta := reader.meta).decode())
    for record in islice(reader, config.head):
        if reader.latest_meta != meta:
            sys.stdout.write(encode_meta(meta := reader.latest_meta).decode())
        sys.stdout.write(encode_record(record).decode())
    return 0
