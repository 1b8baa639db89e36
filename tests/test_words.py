"""Words: short sentences in user pages, their total length, docstrings and identifiers in the terms of the field."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "deploy/README.md", "data/captures/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "recipes").glob("*.md")),
]
"""Pages for users; notes of engineers are in docs/dev/."""
PACKAGES = ("tracefile", "measure", "wire", "engines", "tap", "loadgen", "replay", "sim", "report", "kvtape")
MOST_WORDS = 25_000
"""Of all user pages, and of all engineers' notes; the page of commands, made of their help, apart."""
MOST_WORDS_IN_A_SENTENCE = 25
DIALECT = {
    *("found", "told", "said", "say", "says", "tell", "tells", "place", "places", "placed", "own", "owns", "whole"),
    *("some", "others", "one", "ones", "stand", "stands", "heed", "mend", "mends", "mended", "its"),
    *("judge", "judged", "judging", "settle", "settled", "settling", "room", "rooms", "take", "takes", "taken"),
}
"""Parts of identifiers that name no concept of the field: house words before November 2026."""
FOREIGN_NAMES = {"FileNotFoundError", "ModuleNotFoundError", "take", "ones"}
"""Names of Python and numpy."""
MOST_DIALECT_NAMES = 20
FIELD_NOUN = re.compile(
    r"prefill|decod|KV cache|prefix|block|schedul|preempt|evict|latenc|throughput|batch|token", re.IGNORECASE
)
LEAST_SHARE_WITH_FIELD_NOUN = 0.40
"""Of the docstrings of the product."""
FORBIDDEN_OPENINGS = {
    *("what", "which", "whether", "who", "whom", "whose", "how", "when", "where", "why", "of", "as", "by"),
    *("those", "these", "that", "this", "every", "nobody", "one", "it", "its", "they"),
}
MADE_OF_HELP = ROOT / "docs" / "commands.md"


def without_code(text: str) -> str:
    """A page with fenced blocks, comments and images removed, and inline code as one placeholder word."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"``.+?``|`[^`]+`", "code", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> Iterator[str]:
    """Sentences of a page's prose: tables and headings are left out, a list item begins a sentence."""
    lines = [line for line in without_code(text).splitlines() if not re.match(r"\s*(\||#)", line)]
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", "\n".join(lines))
    for paragraph in paragraphs:
        plain = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", " ".join(paragraph.split()))
        yield from re.split(r"(?<=[.!?])[)*\"]*\s+", plain.replace("**", ""))


def words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    long = [sentence for sentence in sentences(page.read_text()) if len(words(sentence)) > MOST_WORDS_IN_A_SENTENCE]
    assert not long, f"{len(long)} sentences of more than {MOST_WORDS_IN_A_SENTENCE} words"


@pytest.mark.parametrize("page", [page for page in PAGES if page != ROOT / "README.md"], ids=name_of)
def test_pages_begin_with_their_purpose(page: Path) -> None:
    assert re.match(r"# .*\n\nAfter this page you ", page.read_text())


def test_pages_stay_short() -> None:
    for pages in (set(PAGES) - {MADE_OF_HELP}, NOTES):
        assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS


NOTES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "dev").glob("*.md"))]


@pytest.mark.parametrize("page", [*PAGES, *NOTES], ids=name_of)
def test_files_in_pages_exist(page: Path) -> None:
    folders = "|".join((*PACKAGES, "scripts", "tests", "deploy", "docs", "data/captures"))
    named = set(re.findall(rf"(?<=`)(?:{folders})/[\w/.-]*(?=`)", page.read_text())) - {"kvtape/1"}
    assert not [path for path in named if not (ROOT / path).exists()]


def test_example_tests_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    copied = {
        name: re.findall(r"`(test_\w+)`", step) for name, step in re.findall(r"`(tests/\S+\.py)`([^`].*\n?.*)", text)
    }
    assert sum(map(len, copied.values())) >= 2
    assert not [name for path, names in copied.items() for name in names if name not in (ROOT / path).read_text()]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements below a node: definitions are nowhere else, and expressions are four of five nodes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@cache
def modules() -> dict[str, ast.Module]:
    """Syntax trees of the product, by path."""
    paths = sorted(path for package in (*PACKAGES, "scripts") for path in (ROOT / package).rglob("*.py"))
    return {name_of(path): ast.parse(path.read_text()) for path in paths}


def docstrings() -> Iterator[tuple[str, str]]:
    """Position and text of all docstrings of modules, classes, functions, fields and constants."""
    for path, module in modules().items():
        for node in statements(module):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield f"{path}:{node.lineno}", text


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    first_words = [(where, text.split()[0].lower().strip("`.,:")) for where, text in docstrings()]
    assert not [where for where, word in first_words if word in FORBIDDEN_OPENINGS]


def test_docstrings_have_nouns_of_the_field() -> None:
    texts = [text for _, text in docstrings()]
    assert sum(FIELD_NOUN.search(text) is not None for text in texts) >= LEAST_SHARE_WITH_FIELD_NOUN * len(texts)


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every definition and use of a name."""
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def test_identifiers_are_terms_of_the_field() -> None:
    bad = [
        f"{path}:{line}: {name}"
        for path, module in modules().items()
        for line, name in identifiers(module)
        if name not in FOREIGN_NAMES and DIALECT & set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))
    ]
    assert len(bad) <= MOST_DIALECT_NAMES, "\n".join(bad)
