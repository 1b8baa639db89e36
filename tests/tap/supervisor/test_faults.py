"""Whatever breaks beside the traffic: clients see none of it, and every record is accounted for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent.parent
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
    command = [sys.executable, "-m", "scripts.fault_tap", "--only", fault, "--users", "4"]
    done = subprocess.run(
        [*command, "--seconds", "3", "--json", str(tmp_path / "findings.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
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
