"""``sim serve``: connections, APIs and the real-time engine behind them."""
