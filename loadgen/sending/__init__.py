"""Sending of a plan: requests built ahead of need, written at their times, and their responses recorded."""
