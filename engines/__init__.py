"""The engines we know: dialects, facts that an engine tells of itself, recognition, routing rules."""
