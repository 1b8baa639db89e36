"""Any other server of OpenAI's API: only the documented fields, none of which sets an output's length exactly."""

from engines.dialect import GREEDY, Dialect

OPENAI = Dialect(
    "openai",
    constant=GREEDY,
    priority=None,
    injectable=frozenset({"usage"}),
    chat_constant=GREEDY,
    exact_lengths=False,
    returns_ids=False,
)
