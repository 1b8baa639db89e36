"""What docs/privacy.md tells people to run before they hand a trace out does what it says."""

import re
from pathlib import Path

import pytest

from tracefile.__main__ import main
from tracefile.analysis.checking import check_trace
from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import Meta, Record, RequestId

PAGE = Path(__file__).parent.parent.parent / "docs" / "privacy.md"


def test_anonymized_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = Meta(source="tap", model="canary-model", block_size=16, epoch_unix_ns=1_700_000_000_000_000_000)
    record = Record(request_id=RequestId("canary"), arrival_ms=1.0, e2e_ms=25.0, prompt_tokens=3)
    record.model, record.lora = "canary-model", "canary-adapter"
    record.upstream, record.headers = "http://canary.internal:8000", {"x-tenant": "canary"}
    monkeypatch.chdir(tmp_path)
    with TraceWriter("monday.jsonl.zst", meta) as writer:
        writer.write(record)

    command = re.search(r"^ *tracefile (convert .* --anonymize)$", PAGE.read_text(), re.MULTILINE)
    assert command is not None
    assert main(command[1].split()) == 0

    shared_meta, [shared] = load_trace("shared.jsonl.zst")
    assert "canary" not in f"{shared_meta}{shared}"
    assert (shared_meta.epoch_unix_ns, shared_meta.block_size) == (None, 16)
    assert (shared.arrival_ms, shared.e2e_ms, shared.prompt_tokens) == (0.0, 20.0, 3)
    with open_trace("shared.jsonl.zst") as trace:
        assert list(check_trace(trace)) == []
