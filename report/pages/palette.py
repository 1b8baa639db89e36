"""The pages' light colours, from their own style sheet."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

SLOTS: Final = 8
"""Colours of labels; further labels start over."""


@cache
def palette() -> dict[str, str]:
    """Return the colours by name: ``c0`` to ``c7`` of labels, ``ink``, ``muted``, ``line``, ``paper``."""
    css = files("report.pages").joinpath("page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#\w+)", css.partition("}")[0]))


def slot_colour(slot: int) -> str:
    """Return the colour of a label's place; below 0: that of a guide, which is no label's."""
    return palette()["muted" if slot < 0 else f"c{slot % SLOTS}"]
