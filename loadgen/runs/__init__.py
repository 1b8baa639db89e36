"""Parent of a run and its shards, local or on a Ray cluster: one t = 0, one end, one merged trace."""
