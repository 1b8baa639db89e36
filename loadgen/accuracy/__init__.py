"""Accuracy beside speed: tasks of lm-eval-harness as a load, and their scores."""
