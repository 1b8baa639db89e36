"""A shard and its sender: requests built ahead of need, written at their times, and what came of them recorded."""
