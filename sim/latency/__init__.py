"""The latency model: terms of a step, API server, noise, model.json."""
