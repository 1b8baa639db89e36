"""The latency model: terms of a step, front end, noise, model.json."""
