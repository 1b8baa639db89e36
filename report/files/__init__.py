"""A run's metrics as files: tables and a timeline."""
