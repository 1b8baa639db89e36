"""Modules that are imported when they are first used."""

import sys

import pytest

from tracefile.records.latenames import LateModule


def test_a_late_module_is_imported_by_its_first_name_and_asked_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    late = LateModule("colorsys")
    assert "colorsys" not in sys.modules
    assert late.rgb_to_hsv(1.0, 1.0, 1.0) == (0.0, 0.0, 1.0)
    assert "colorsys" in sys.modules
    assert "rgb_to_hsv" in vars(late)
