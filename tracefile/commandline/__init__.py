"""The shared ends of every command: exit codes, progress."""
