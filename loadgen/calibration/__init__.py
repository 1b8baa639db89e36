"""``loadgen calibrate``: what this machine can send, found against a server that knows the truth."""
