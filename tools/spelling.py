"""Check the words of pages, docstrings and comments: ``python -m spelling`` prints those that no dictionary has.

``words.txt`` has the words of this project, and the phrases that it does not use.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from spellchecker import SpellChecker

CHECKOUT = Path(__file__).resolve().parent.parent
OWN = CHECKOUT / "tools" / "words.txt"
FOLDERS = ("docs", "librmq", "tests", "tools", "examples", "benchmarks")
_NO_PROSE = re.compile(r"^```.*?^```$|^ {4}.*$|`+[^`]*`+|\]\([^)]*\)|<[^>\n]*>|https?://\S+", re.MULTILINE | re.DOTALL)
"""Of a page: code, the targets of links, and marks."""
_CODE = re.compile(r"``[^`]*``|`[^`\n]*`|^ *(?:>>>|\.\.\.) .*$|https?://\S+", re.MULTILINE)
"""Of a docstring or a comment."""
_DOCSTRING = re.compile(r'^ *r?"""(.*?)"""|""".*?"""', re.MULTILINE | re.DOTALL)
"""Or another long string, so that its end, which can begin a line, begins no docstring."""
_COMMENT = re.compile(r"(?:^|  )#[ :](?! *(?:fmt|noqa|type|pragma|isort)\b)(.*)$", re.MULTILINE)
_WORD = re.compile(r"(?<![\w./@%\\-])[A-Za-z][a-z]+(?:'[a-z]+)?(?![\w/@(=-]|\.\w)")
"""A word in small letters but for the first: what else there is are names."""


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """Return text of the same lines, without what a pattern matches."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file, in parts, each with the number of its first line."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield 1, blanked(_NO_PROSE, text)
        return
    for pattern in (_DOCSTRING, _COMMENT):
        for match in pattern.finditer(text):
            if match[1] is not None:
                yield text.count("\n", 0, match.start(1)) + 1, blanked(_CODE, match[1])


def own_words() -> tuple[set[str], re.Pattern[str]]:
    """Return the project's words, in small letters, and what its prose does not say."""
    lines = [line for line in OWN.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    refused = [line[1:].strip() for line in lines if line.startswith("!")]
    words = {line.lower() for line in lines if not line.startswith("!")}
    return words, re.compile(rf"\b(?:{'|'.join(refused)})\b", re.IGNORECASE)


def faults(path: Path, words: set[str], refused: re.Pattern[str]) -> Iterator[str]:
    """Yield the places of unknown words and refused phrases in a file."""
    for first, text in prose_of(path):
        for pattern in (_WORD, refused):
            for match in pattern.finditer(text):
                if pattern is refused or match[0].lower().removesuffix("'s") not in words:
                    number = first + text.count("\n", 0, match.start())
                    yield f"{path.relative_to(CHECKOUT)}:{number}: {match[0]}"


def main() -> int:
    """Print the faults; return the exit status."""
    words, refused = own_words()
    words |= SpellChecker(language="en").word_frequency.dictionary.keys()
    paths = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("*.py")]
    for folder in FOLDERS:
        paths += [path for end in ("*.md", "*.py") for path in sorted((CHECKOUT / folder).rglob(end))]
    paths = [path for path in paths if path.parent.name != "results"]  # tables of benchmarks
    found = [line for path in paths for line in faults(path, words, refused)]
    print("\n".join(found))
    if found:
        print(f"{len(found)} words are in no dictionary, or refused: correct them, or add them to tools/words.txt")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
