"""Chat messages as a session: every assistant's message ends a turn, and is there for its length alone."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from loadgen.datasets.session import DatasetOptions, DatasetSession, DatasetTurn
from loadgen.text.messages import Quoted

Message = Mapping[str, Any]


def session_of(messages: Iterable[Message], options: DatasetOptions) -> DatasetSession:
    """What is said before each answer; answers before anything was said, and empty messages, are left out."""
    return list(islice(_turns(messages, options), options.max_turns))


def _turns(messages: Iterable[Message], options: DatasetOptions) -> Iterator[DatasetTurn]:
    said: list[Quoted] = []
    for message in messages:
        quoted = Quoted(dict(message))
        if quoted.role == "assistant":
            if any(each.role != "system" for each in said):
                yield DatasetTurn(quoted=said, output_tokens=_length(quoted, options))
                said = []
        elif message.get("content"):
            said.append(as_user(quoted) if quoted.role == "tool" and options.tool_role == "user" else quoted)
    if any(each.role != "system" for each in said):
        yield DatasetTurn(quoted=said)


def as_user(tool: Quoted) -> Quoted:
    """A tool's result as a user's message: the model's real answer has made no call that it could belong to."""
    return Quoted({"role": "user", "content": tool.message["content"]})


def _length(answer: Quoted, options: DatasetOptions) -> int | None:
    """How long an answer was; null: it was empty, or nobody wants to know."""
    if not options.counts_answers:
        return None
    return options.lengths.count(answer.text + _calls(answer.message)) or None


def _calls(message: Message) -> str:
    """The text of an answer's tool calls, which the model had to write too."""
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", {}) for call in calls if isinstance(call, dict)]
    return "".join(f"{function.get('name', '')}{function.get('arguments', '')}" for function in functions)
