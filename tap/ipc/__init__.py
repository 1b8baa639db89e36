"""Messages between the processes of the tap."""
