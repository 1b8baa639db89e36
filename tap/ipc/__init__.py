"""Messages, settings and shared memory of the tap's processes."""
