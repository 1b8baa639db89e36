"""The shared parts of every command: parser, old names, durations, exit codes, progress, version."""
