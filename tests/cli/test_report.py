"""``report``: the two files it writes, comparison with an earlier report, and refusals."""

from __future__ import annotations

import json
import sys

import pytest

from tests.cli.stand import Shell, files_of, unpack_store
from tests.programs import run_program

pytest.importorskip("jinja2")


def test_it_writes_a_page_and_json_without_spark(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)  # makes an import of pyspark fail
    before = files_of(shell.folder / "store")
    (row,) = shell("report", "store").rows
    assert (row["report"], row["json"]) == (str(shell.folder / "report.html"), str(shell.folder / "report.json"))
    found = json.loads((shell.folder / "report.json").read_text())
    (part,) = found["stores"]
    severities = [one["severity"] for one in part["findings"]]
    assert (row["errors"], row["warnings"]) == (severities.count("error"), severities.count("warning"))
    assert files_of(shell.folder / "store") == before
    for name in ("lag", "topics"):
        assert part[name] == shell(name, "store").rows
    assert part["dead_letters"] == shell("dead-letters", "store", "--causes").rows
    assert part["findings"] == shell("diagnose", "store").rows


@pytest.mark.slow
def test_an_earlier_report_is_compared(shell: Shell) -> None:
    shell("report", "store", "-o", "first.html")
    shell("reset", "store", "--group", "CG_order", "--topic", "OrderTopic", "--to", "end")
    answer = shell("report", "store", "-o", "first.html", "--compare", "first.json")  # overwrites the earlier report
    assert answer.status == 0
    html = (shell.folder / "first.html").read_text()
    assert '<section id="changes">' in html
    assert "75" in html.partition('<section id="changes">')[2].partition("</section>")[0]


@pytest.mark.slow
def test_the_path_may_be_one_level_too_high(shell: Shell) -> None:
    unpack_store(shell.folder / "other")
    answer = shell("report", "other", "store", "--no-verify")
    assert "note: the store is other/store" in answer.said
    found = json.loads((shell.folder / "report.json").read_text())
    assert [one["is_sound"] for one in found["stores"]] == [None, None]
    assert len({one["store"] for one in found["stores"]}) == 2


def test_a_store_that_cannot_be_listed_gets_its_report(shell: Shell) -> None:
    """Its topics are not known, so nothing is said about a name that may be one of them."""
    (shell.folder / "store" / "consumequeue" / "OrderTopic" / "-1").mkdir()
    answer = shell("report", "store", "--topic", "OrderTopics", "--group", "CG_orders")
    assert answer.status == 1  # the folder -1 is no queue, so the numbers can lack messages
    assert "did you mean" not in answer.said
    assert (shell.folder / "report.html").exists()


def test_wrong_arguments_are_reported(shell: Shell) -> None:
    (shell.folder / "other.json").write_text("{}")
    for words, said in (
        (["nothing"], "nothing"),
        (["store", "store"], "found one twice"),
        (["store", "-o", "no/such/page.html"], "no/such/page.html: No such file"),
        (["store", "--compare", "no.json"], "--compare no.json: No such file"),
        (["store", "--compare", "other.json"], "name the JSON beside an earlier page"),
        (["store", "--tag", "||"], "expected tags"),
    ):
        answer = shell("report", *words)
        assert (answer.status, said in answer.said) == (2, True), answer.said


def test_without_the_extra_it_is_named(shell: Shell) -> None:
    """In a process of its own: an import of jinja2 fails there."""
    program = """
        import sys
        sys.modules["jinja2"] = None
        from librmq.cli import main
        sys.exit(main(["report", "store"]))
    """
    child = run_program(program)
    assert (child.returncode, "librmq[report]" in child.stderr) == (2, True)
    assert not (shell.folder / "report.html").exists()
