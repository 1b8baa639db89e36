"""Command-line parts that all commands share: parser, durations, exit codes, progress, version."""
