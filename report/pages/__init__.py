"""Pages as plain data, and their renderers: panels, figures, terminal and HTML."""
