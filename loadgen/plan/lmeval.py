"""Settings of ``--lm-eval``: tasks of lm-eval-harness in place of a load's own requests."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tracefile import InputError
from tracefile.commandline.configfile import flag_of

FLAGS = ("num_fewshot", "limit", "include_path", "log_samples")
"""Further flags of such a run."""
KEPT = frozenset(
    {"lm_eval", *FLAGS}
    | {"url", "output", "model", "dialect", "tokenizer", "api", "chat_template", "no_stream", "extra_body"}
    | {"pattern", "rate", "burstiness", "parallel", "seed", "timeout", "overwrite", "json"}
    | {"procs", "ray", "json_progress", "log_interval", "gpus", "slo", "slo_file"}
    | {"api_key_env", "header_env", "header", "ca", "cert", "key"}
)
"""Flags of a load that mean the same here."""
PATTERNS = ("poisson", "constant", "gamma")


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEval:
    """Tasks, and how their documents become requests."""

    tasks: tuple[str, ...]
    """Names in lm-eval, or paths of task files."""
    num_fewshot: int | None = None
    """Null: each task's own."""
    limit: int | None = None
    """Documents of each task; null: all."""
    include_path: Path | None = None
    """Folder of further task files."""
    log_samples: bool = False

    def __post_init__(self) -> None:
        if not self.tasks or "" in self.tasks:
            raise InputError("--lm-eval: an empty name; expected tasks with commas between, such as gsm8k,arc_easy")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise InputError(f"--num-fewshot: {self.num_fewshot}; expected 0 or more")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"--limit: {self.limit}; expected 1 or more")


def add_lm_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "accuracy", "needs kvtape[lm-eval]; the tasks' documents make the load"
    ).add_argument
    add(
        "--lm-eval",
        metavar="TASK,…",
        help="send lm-eval-harness's tasks, such as gsm8k or a task file, and score the outputs",
    )
    add("--num-fewshot", type=int, help="examples before each question (default: the task's)")
    add("--limit", type=int, help="only the first N documents of each task")
    add("--include-path", type=Path, metavar="DIR", help="folder with further task files")
    add("--log-samples", action="store_true", help="also write lm-eval's samples files: questions and outputs as text")


def lm_eval_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> LmEval | None:
    """Return the tasks that the flags ask for; null: a load of its own. Raises InputError for flags of the other."""
    given = [name for name in vars(args) if getattr(args, name) != parser.get_default(name)]
    if args.lm_eval is None:
        _refuse((name for name in given if name in FLAGS), "without --lm-eval; expected both")
        return None
    if args.resume:
        raise InputError("--resume: with --lm-eval, whose outputs are kept in memory alone; expected a new run")
    _refuse((name for name in given if name not in KEPT), "with --lm-eval, whose tasks make the load; expected without")
    if args.pattern not in PATTERNS:
        raise InputError(f"--pattern: {args.pattern} with --lm-eval; expected one of {', '.join(PATTERNS)}")
    if args.api not in ("completions", "chat"):
        raise InputError(f"--api: {args.api} with --lm-eval; expected completions or chat")
    if parser.prog != "loadgen":
        raise InputError(f"--lm-eval: with {parser.prog}; expected a run of loadgen alone")
    return LmEval(
        tasks=tuple(name.strip() for name in args.lm_eval.split(",")),
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        include_path=args.include_path,
        log_samples=args.log_samples,
    )


def _refuse(names: Iterable[str], reason: str) -> None:
    if flags := [flag_of(name) for name in names]:
        raise InputError(f"{', '.join(flags)}: {reason}")
