"""A recording reverse proxy before inference engines: traffic becomes a trace, without its content."""
