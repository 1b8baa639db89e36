"""Reports: metrics, intervals, gates and pictures of traces side by side."""
