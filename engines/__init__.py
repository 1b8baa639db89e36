"""Engines; to add one: a ``Dialect`` in ``NAME.py``, its name in ``DialectName``, its value in ``DIALECTS``."""
