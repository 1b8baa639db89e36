"""``tap read-log``: a trace out of a request log, as if a tap had recorded it, and the places where prompts part."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracefile.commandline.parser import Parser
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    from tap.logs import logtrace
else:  # the recorder, which the flags need not
    logtrace = LateModule("tap.logs.logtrace")

EPILOG = "examples:\n  tap read-log requests.jsonl --tokenizer /models/your-model -o monday.jsonl.zst\n"


def parser() -> Parser:
    made = Parser(prog="tap read-log", description=__doc__.partition(": ")[2] if __doc__ else None, epilog=EPILOG)
    made.add_argument("log", type=Path, help="OpenAI chat, batch or messages JSONL, or a gateway's rows")
    made.add_argument("-o", "--output", required=True, metavar="OUT", help="trace to write; .gz, .zst")
    made.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    made.add_argument(
        "--tokenizer", required=True, metavar="PATH|bytes|ids", help="source of token ids: the model's tokenizer"
    )
    made.add_argument(
        "--endpoint", metavar="PATH", help="API of rows that name none, as /v1/messages (default: by its keys)"
    )
    made.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="block size of the hashes")
    made.add_argument("--model", metavar="NAME", help="model that hash chains start from (default: each request's own)")
    made.add_argument(
        "--hash", choices=["xxh3_64", "blake2b"], default="xxh3_64", dest="algorithm", help="hash algorithm"
    )
    made.add_argument("--key-file", type=Path, help="secret key of the hashes (default: the tap's)")
    made.add_argument("--json", action="store_true", help="print the places as one JSON object on stdout")
    return made


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    return logtrace.read_log(arguments)
