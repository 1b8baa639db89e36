"""The page of one trace: its panels, each a figure with its words and numbers."""
