"""``loadgen selftest``: the rate this machine can send, against a server that knows the truth."""
