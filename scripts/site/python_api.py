"""The page of ``kvtape``'s functions and records, made from their source: signatures, fields and docstrings."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module

import kvtape

HEAD = """# The Python API

After this page you know every name of `import kvtape`. It is made of the code.
Examples are in [From Python](python.md).
"""
LONGEST = 96


def source_of(found: object) -> ast.FunctionDef | ast.ClassDef:
    """The definition of a function or class."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(found))).body  # type: ignore[arg-type]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def docstring_of(node: ast.FunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").replace("``", "`")


def signature_of(node: ast.FunctionDef) -> str:
    """A signature as it is written, a parameter a line if it is long."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"kvtape.{node.name}({ast.unparse(node.args)}){result}"
    if len(line) <= LONGEST:
        return line
    found = node.args
    several = list(zip(found.args, padded(found.args, found.defaults), strict=True))
    named = list(zip(found.kwonlyargs, found.kw_defaults, strict=True))
    star = ["*"] if named and not found.vararg else []
    more = [f"**{ast.unparse(found.kwarg)}"] if found.kwarg else []
    parts = [*map(parameter, several), *star, *map(parameter, named), *more]
    return f"kvtape.{node.name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"


def padded(arguments: Sequence[ast.arg], defaults: Sequence[ast.expr]) -> list[ast.expr | None]:
    """Defaults of positional arguments, None for those without."""
    return [*[None] * (len(arguments) - len(defaults)), *defaults]


def parameter(argued: tuple[ast.arg, ast.expr | None]) -> str:
    argument, default = argued
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def field_rows(node: ast.ClassDef) -> Iterator[str]:
    """A row for each field of a record, with the docstring below it."""
    for place, line in enumerate(node.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            below = node.body[place + 1] if place + 1 < len(node.body) else None
            told = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            meaning = " ".join(str(told).split()).replace("``", "`").replace("|", "\\|")
            kind = ast.unparse(line.annotation).replace("|", "\\|")
            yield f"| `{line.target.id}` | `{kind}` | {meaning} |"


def record(found: type) -> str:
    """A record's section: its docstring and its fields."""
    node = source_of(found)
    assert isinstance(node, ast.ClassDef)
    rows = list(field_rows(node))
    table = ["", "| field | type | meaning |", "|---|---|---|", *rows] if rows else []
    return "\n".join([f"### `{found.__name__}`", "", docstring_of(node), *table, ""])


def function(name: str) -> str:
    """A function's section."""
    node = source_of(getattr(kvtape, name))
    assert isinstance(node, ast.FunctionDef)
    return f"### `{name}`\n\n```python\n{signature_of(node)}\n```\n\n{docstring_of(node)}\n"


def result_of(function: object) -> object:
    """The class that a function returns, from its module's imports: some are for type checkers alone."""
    node, module = source_of(function), inspect.getmodule(function)
    assert isinstance(node, ast.FunctionDef)
    assert module is not None
    for line in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(line, ast.ImportFrom) and isinstance(node.returns, ast.Name):
            for found in line.names:
                if found.name == node.returns.id:
                    return getattr(import_module(line.module or ""), found.name)
    return None


def api_page() -> str:
    """The whole page: functions, then the records that they take and return."""
    functions = [name for name in kvtape.__all__ if inspect.isfunction(getattr(kvtape, name))]
    own = {name: getattr(kvtape, name) for name in kvtape.__all__ if name not in functions}
    for name in functions:
        result = result_of(getattr(kvtape, name))
        if inspect.isclass(result) and result.__module__.partition(".")[0] in (
            "measure",
            "loadgen",
            "replay",
            "report",
            "sim",
        ):
            own[result.__name__] = result
    parts = [
        HEAD,
        "## Functions\n",
        *map(function, functions),
        "## Records\n",
        *(record(own[name]) for name in sorted(own)),
    ]
    return "\n".join(parts)
