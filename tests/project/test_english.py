"""All prose is plain English: words that read as translated, and that came back in the past, occur nowhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.reference import CHECKOUT

FOLDERS = ("librmq", "docs", "examples", "benchmarks", "tools", "tests")
OWN_STRINGS = ("librmq", "examples", "benchmarks", "tools")  # in tests, strings are data
ODD = {
    r"whoever|whomever|somebody|nobody|anew|how manieth": "name who acts: the caller, the writer, another process",
    r"he|him|his": "a process, a thread or a caller is 'it'",
    r"the original(?! (topic|message|queue|file|order|name|body))": "name it: RocketMQ, or the broker",
    r"(is|are|was|were|be) told": "say how: reported, logged, raised, printed, refused",
    r"(go|goes|going) on(?! (the|a|an|one)\b)|gone on with": "continue",
    r"(?<!are )(?<!is )all the same(?! \w)": "still, anyway",
    r"likewise|in the midst|with no warning": "in the same way, during, without warning",
}
MERGE = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document, or the names of tests, docstrings, comments and own strings of a module."""
    source = path.read_text("utf-8")
    if path.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value.lineno)
    has_own = path.relative_to(CHECKOUT).parts[0] in OWN_STRINGS
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT or (token.type in strings and (has_own or line in docstrings)):
            yield from enumerate(token.string.splitlines(), line)


def files() -> list[Path]:
    found = [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md"]
    for folder in FOLDERS:
        found += [path for path in sorted((CHECKOUT / folder).rglob("*")) if path.suffix in (".py", ".md", ".lark")]
    return [path for path in found if path != Path(__file__)]


def test_no_text_has_an_odd_word() -> None:
    patterns = [(re.compile(rf"\b({odd})\b", re.IGNORECASE), advice) for odd, advice in ODD.items()]
    anywhere = re.compile(rf"\b({'|'.join(ODD)})\b")  # few files need to be read token by token
    found = [
        f"{path.relative_to(CHECKOUT)}:{number}: {match[0]!r} in {line.strip()!r}: {advice}"
        for path in files()
        if anywhere.search(path.read_text("utf-8").replace("_", " ").lower())
        for number, line in texts(path)
        for pattern, advice in patterns
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(found)


def test_no_file_has_marks_of_a_merge() -> None:
    assert [str(path) for path in files() if MERGE.search(path.read_text("utf-8"))] == []
