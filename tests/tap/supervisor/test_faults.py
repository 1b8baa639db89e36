"""Whatever breaks beside the traffic: clients see none of it, and every record is accounted for."""

import json
from pathlib import Path

import pytest

from tests.warmstart import run_warm

FAULTS = (
    "recorder killed",
    "recorder hangs",
    "disk full",
    "tokenizer raises",
    "tokenizer crashes",
    "key unreadable",
    "admin hammered",
    "admin killed",
    "clock stepped",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_client_notices_a_fault_and_no_record_is_unaccounted_for(tmp_path: Path, fault: str) -> None:
    flags = ["--only", fault, "--users", "4", "--seconds", "3", "--json", str(tmp_path / "findings.json")]
    done = run_warm("scripts.fault_tap", *flags)
    found = json.loads((tmp_path / "findings.json").read_text())
    if not found:
        pytest.skip(done.stderr.strip())
    [finding] = found
    assert finding["failures"] == {}, "a client noticed"
    assert finding["problems"] == []
    assert finding["sent"] == finding["offered"]
    assert finding["offered"] == finding["recorded"] + finding["sampled_out"] + sum(finding["dropped"].values())
    assert finding["recorded"] == finding["in_files"]
    assert done.returncode == 0, done.stderr
