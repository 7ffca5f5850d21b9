"""Which part of the stores a pipeline looks at: topics, groups, tags, times and queue offsets, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name

from librmq.diagnosis.survey.message_sums import parse_time
from librmq.errors import ConfigError
from librmq.message.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Settings = Mapping[str, str]

TOPIC: Final = {"topic": "names separated by commas (all)"}
GROUP: Final = {"group": "names separated by commas (all)"}
TIMES: Final = {
    "since": "stored at this time or later, ISO 8601 with a zone or milliseconds (all)",
    "until": "stored before this time (all)",
}
MESSAGES: Final = (
    TOPIC
    | TIMES
    | {
        "tags": "a subscription such as a || b (all)",
        "starting_offsets": 'first queue offsets, as JSON: {"TopicA": {"0": 23}} (all)',
        "ending_offsets": "the queue offsets before which it ends, in the same form (all)",
    }
)
_OPTIONS: Final = {
    "topic": "topic",
    "tags": "tags",
    "since": "startingTimestamp",
    "until": "endingTimestamp",
    "starting_offsets": "startingOffsets",
    "ending_offsets": "endingOffsets",
}


def source_options(settings: Settings) -> dict[str, str]:
    """Return the options of the data source for ``settings``; it prunes by them.

    Raises:
        ConfigError: A time is none, or ``since`` is after ``until``.
    """
    times = {name: parse_time(name, settings[name]) for name in TIMES if name in settings}
    if len(times) == len(TIMES) and times["since"] > times["until"]:
        raise ConfigError(
            f"setting since: expected a time before until, found {settings['since']!r} and {settings['until']!r}"
        )
    return {option: str(times.get(name, settings[name])) for name, option in _OPTIONS.items() if name in settings}


def names_of(settings: Settings, name: str) -> list[str] | None:
    """Return the names of a setting; None where all are wanted."""
    return [text.strip() for text in settings[name].split(",")] if name in settings else None


def first_sends(messages: DataFrame) -> DataFrame:
    """Return the messages that are neither retries nor dead letters."""
    return messages.where(is_first_send())


def is_first_send() -> Column:
    """Return the condition that a message is neither a retry nor a dead letter; null without a topic."""
    topic = F.col("topic")
    return ~topic.startswith(RETRY_PREFIX) & ~topic.startswith(DEAD_LETTER_PREFIX)


def named_rows(frame: DataFrame, settings: Settings) -> DataFrame:
    """Return the rows of ``frame`` with a topic and a group that ``settings`` name."""
    for name in ("topic", "group"):
        names = names_of(settings, name)
        if names is not None and name in frame.columns:
            frame = frame.where(F.col(name).isin(names))
    return frame
