"""Latency model: terms of a scheduler step, API server, noise, model.json."""

import tracefile.compiled  # noqa: F401 - before any module that may be compiled
