"""Parts of the simulator benchmark."""
