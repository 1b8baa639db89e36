"""Synthetic load: what to send × when × how, and the one sender that replay uses too."""
