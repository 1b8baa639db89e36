"""Other people's traces, read as ours: each module is one format, recognised by its content."""
