"""A run's parent and its shards, here or on other machines: started together, ended together, merged into one trace."""
