"""Inference engines. To add an engine: a ``Dialect`` in ``NAME.py``, listed in ``DialectName`` and ``DIALECTS``."""
