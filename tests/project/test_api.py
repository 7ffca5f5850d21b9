"""What a version promises to programs: `api.txt` lists it, and it changes only with a line in the changelog."""

from __future__ import annotations

import importlib
import subprocess
from types import ModuleType

import pytest

from tests.reference import CHECKOUT

API = "api.txt"
CHANGELOG = "CHANGELOG.md"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("api")


def test_the_file_is_up_to_date(api: ModuleType) -> None:
    written = (CHECKOUT / API).read_text("utf-8").splitlines()
    promised = api.api().splitlines()
    advice = "run `python tools/api.py`, and say in CHANGELOG.md what users must change"
    assert sorted({*written} ^ {*promised}) == [], advice
    assert written == promised, advice


def test_a_version_promises_few_names(api: ModuleType) -> None:
    """What is promised can't be replaced any more; a name that no page teaches and no user needs stays librmq's own."""
    assert sum(map(len, api.promised().values())) <= 450


def git(*words: str) -> str:
    """Return what git prints about the checkout; skip where that has no history, as in a wheel or an archive."""
    try:
        command = ["git", "-c", "safe.directory=*", *words]
        result = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"git can't be run: {error}")
    if result.returncode or not (CHECKOUT / ".git").exists():
        pytest.skip(f"this is no clone with a history: {result.stderr.strip()}")
    return result.stdout.strip()


@pytest.mark.platform
def test_the_file_changes_only_with_a_line_in_the_changelog() -> None:
    """The last change of the file comes with a change of the changelog, or has one after it."""
    changed = git("status", "--porcelain", "--", API, CHANGELOG)
    assert API not in changed or CHANGELOG in changed, "CHANGELOG.md must say what changes in api.txt"
    if last := git("log", "-1", "--format=%H", "--", API):
        later = git("log", "--format=%H", f"{last}^..HEAD", "--", CHANGELOG) if git("rev-parse", f"{last}^@") else "x"
        assert changed or later, f"no line in CHANGELOG.md says what commit {last[:12]} changed in api.txt"
