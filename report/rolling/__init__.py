"""Rolling fits of ``sim fit --window``: changes of the engine by time, as text and as a page."""
