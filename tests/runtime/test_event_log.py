"""Log lines with named fields."""

from __future__ import annotations

import logging

import pytest

from librmq.errors import ConfigError
from librmq.message.message import MessageQueue
from librmq.runtime.event_log import EventLog


def fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name.startswith("rmq_")}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> EventLog:
    caplog.set_level(logging.INFO, "librmq.of_a_test")
    return EventLog("librmq.of_a_test")


def test_a_line_has_its_text_and_fields(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.warning("group %(group)s: %(count)d are gone%(_end)s", group="g", count=3, path=None, _end="!")
    (record,) = caplog.records
    assert (record.getMessage(), record.levelname) == ("group g: 3 are gone!", "WARNING")
    assert fields(record) == {"rmq_group": "g", "rmq_count": 3, "rmq_path": None}
    assert record.funcName == "test_a_line_has_its_text_and_fields"


def test_a_queue_adds_its_parts(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.info("%(queue)s", queue=MessageQueue("t", "b", 2))
    (record,) = caplog.records
    assert record.getMessage() == "t/b/2"
    assert fields(record) == {"rmq_queue": "t/b/2", "rmq_topic": "t", "rmq_broker": "b", "rmq_queue_id": 2}


def test_reserved_names_of_log_records_are_allowed(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    log.error("%(name)s", name="x", msg=1, args=2, exc_info=ValueError("no"), thread=4)
    (record,) = caplog.records
    assert record.getMessage() == "x"
    assert record.exc_info is not None
    assert fields(record) == {"rmq_name": "x", "rmq_msg": 1, "rmq_args": 2, "rmq_thread": 4}


def test_fields_of_every_line_and_texts_of_values(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    """In a line without fields, a percent sign stays as it is."""
    bound = log.with_fields(group="g").with_fields(client="c")
    bound.error("%(group)s: %(error)s", error=ValueError("no"))
    log.error("100%")
    try:
        raise KeyError(1)
    except KeyError:
        log.exception("it failed")
    first, second, third = caplog.records
    assert fields(first) == {"rmq_group": "g", "rmq_client": "c", "rmq_error": "no"}
    assert (first.getMessage(), second.getMessage()) == ("g: no", "100%")
    assert third.exc_info is not None


def test_a_disabled_line_makes_no_text(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("made a text")

    log.debug("%(what)s", what=Unprintable())
    log.log(logging.DEBUG, "%(what)s", what=Unprintable())
    assert not caplog.records


def test_no_value_ends_a_line_or_commands_a_terminal(log: EventLog, caplog: pytest.LogCaptureFixture) -> None:
    unsafe = "a\x1b[31m\nb\x9b\u202ec"
    escaped = "a\\u001b[31m\\u000ab\\u009b\\u202ec"
    log.error("%(key)s %(error)s", key=unsafe, error=ValueError(unsafe))
    log.error("%(error)s", error=ConfigError(unsafe))
    first, second = caplog.records
    assert first.getMessage() == f"{escaped} {escaped}"
    assert first.rmq_key == escaped  # type: ignore[attr-defined]
    assert second.getMessage() == str(ConfigError(unsafe)) == escaped.replace("\\u000a", "\n")


def test_a_traceback_neither_commands_a_terminal_nor_begins_a_line(
    log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    message = "a\x1b[31m\r2026-11-27 INFO all is well\n2026-11-27 INFO paid\u202e\u200b"
    try:
        try:
            raise ValueError(message)
        except ValueError as error:
            error.add_note(message)
            raise ConfigError(message) from error
    except ConfigError as error:
        log.error("failed", exc_info=error)
        log.exception("failed")
    for record in caplog.records:
        assert record.exc_info is not None  # for a formatter of another form
        assert isinstance(record.exc_info[1], ConfigError)
        assert (record.funcName.startswith("test_a_traceback"), record.filename) == (True, "test_event_log.py")
        first, *lines = logging.Formatter().format(record).split("\n")
        assert first == "failed"
        assert [line for line in lines if line and not line.startswith("  ")] == []
        assert "  ValueError: a\\u001b[31m\\u000d2026-11-27 INFO all is well" in lines
        assert "  2026-11-27 INFO paid\\u202e\\u200b" in lines
        assert "\x1b" not in "".join(lines)
