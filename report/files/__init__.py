"""A run's metrics as files: ours, and in the shapes of other tools."""
