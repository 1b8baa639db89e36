"""The pages about the tap name flags, metrics and reasons that exist."""

import inspect
import re
from pathlib import Path

import yaml

from tap.__main__ import parser
from tap.admin import metrics
from tap.ipc import sharedmemory
from tap.recorder import recorder, recording
from tap.supervisor import account

ROOT = Path(__file__).parent.parent.parent
PAGE = "\n".join((ROOT / "docs" / name).read_text() for name in ("tap.md", "tap-operations.md", "before-production.md"))
FOREIGN_FLAGS = {
    *("--enable-prompt-tokens-details", "--stop-timeout", "--long"),
    *("--retry", "--retry-connrefused", "--retry-delay", "--url"),
}


def test_documented_flags_exist() -> None:
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert named - FOREIGN_FLAGS <= flags


def test_every_metric_is_exposed() -> None:
    exposed = set(re.findall(r'"([a-z_]+)"', inspect.getsource(metrics)))
    named = {name.removesuffix("_total") for name in re.findall(r"kvtape_tap_(\w+)", PAGE)}
    assert named
    assert named <= exposed


def test_loss_reasons_are_documented() -> None:
    """Workers' and the account's reasons are all there; of the recorder's, whose tails name an exception, the heads."""
    source = "".join(map(inspect.getsource, (account, recorder, recording, sharedmemory)))
    explained = set(re.findall(r"`(queue_full|\w+_died|recorder_\w+|trace_\w+|request_larger\w+)(?::…)?`", PAGE))
    assert explained >= {*sharedmemory.DROP_CELLS, "worker_died", "recorder_died", "trace_unwritable"}
    assert all(reason in source for reason in explained)


def test_documented_alerts_equal_the_file() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())["groups"][0]["rules"]
    written = {
        f"`{rule['expr']}`" + (f" for {rule['for'][:-1]} {rule['for'][-1]}" if "for" in rule else "") for rule in rules
    }
    assert written == set(re.findall(r"^\| [^|]+ \| (`[^|]*kvtape_tap_[^|]*?) \|", PAGE, re.MULTILINE))


def test_documented_taps_use_inject_auto() -> None:
    texts = {
        path: re.sub(r"\\\n\s*|\n\s+- (?=--)", " ", path.read_text())
        for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "recipes", *(ROOT / "deploy").iterdir(), ROOT / "deploy")
        if folder.is_dir()
        for path in folder.iterdir()
        if path.is_file() and path.suffix in (".md", ".yaml", ".service") and path.name != "CHANGELOG.md"
    }
    lines = [(path.name, line) for path, text in texts.items() for line in text.splitlines()]
    asking = [(name, line) for name, line in lines if re.search(r"\s--tokenizer[ =]engine\s+-", line)]
    assert {"README.md", "tap.md", "sidecar.yaml", "compose.yaml", "kvtape-tap.service"} <= {name for name, _ in asking}
    assert [line for _, line in asking if not re.search("--inject[ =]auto", line)] == []
    assert [line for _, line in lines if "tap --" in line and re.search("--inject[ =]usage", line)] == []
