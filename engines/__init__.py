"""The engines that kvtape knows: request fields, metrics, tokenizer calls, cache reset and routing rules.

To add an engine: write ``engines/NAME.py`` with one ``Dialect``, add its name to ``DialectName`` in
``engines/dialect.py``, and add the value to ``DIALECTS`` in ``engines/recognition.py``.
"""
