"""What makes a replay or a forecast believed: metrics, intervals, gates and pictures of traces set side by side."""
