"""The HTTP side of ``sim serve``: connections, the APIs and their events, faults, several engines behind one port."""
