"""Health and metrics of a tap, made of numbers that its processes report when they are asked for."""
