"""Notes about topics and groups that a store does not have, with the name that was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from librmq.cli.output import Output, complain
from librmq.config import nearest
from librmq.errors import StoreError

if TYPE_CHECKING:
    from librmq.store import MessageStore


GROUPS: Final = "; librmq groups lists the groups"
TOPICS: Final = "; librmq topics lists the topics"
"""What to do about an unknown name, for `near`."""


def note_group(group: str | None, groups: Collection[str], output: Output) -> None:
    """Tell a person that there is no such group, and which one is near."""
    if group is not None and group not in groups:
        output.says_nothing_found = False
        complain(f"note: there is no group {group!r}{near(group, groups, GROUPS)}")


def note_topic(topic: str | None, topics: Collection[str], output: Output) -> None:
    """Tell a person that a topic has no queue, and which one is near."""
    if topic is not None and topic not in topics:
        output.says_nothing_found = False
        complain(f"note: topic {topic!r} has no queue{near(topic, topics, TOPICS)}")


def note_topic_of(store: MessageStore, topic: str | None, output: Output) -> None:
    """Tell a person that a topic has no queue in a store, if no row was printed."""
    if not output.rows:
        note_topic(topic, {name for name, _ in store.queues}, output)


def note_message(output: Output, *, name: str | None, kind: str, is_limited: bool = False) -> None:
    """Tell a person that no message has an id or a key, if no row was printed."""
    if name is not None and not output.rows and output.says_nothing_found:
        output.says_nothing_found = False
        where = " among those that the other options select" if is_limited else ""
        complain(f"note: no message has the {kind} {name!r}{where}")


def note_part(stores: Iterable[str], topics: str | None, groups: str | None, output: Output) -> None:
    """Tell a person which of the topics and groups, separated by commas, none of the stores has.

    It prints nothing if a store can't be read, because its names are not known.
    """
    folders = list(stores)
    if topics is not None and (names := _names_in(folders, _topics)) is not None:
        for topic in topics.split(","):
            note_topic(topic.strip(), names, output)
    if groups is not None and (names := _names_in(folders, _groups)) is not None:
        for group in groups.split(","):
            note_group(group.strip(), names, output)


def _names_in(stores: Iterable[str], names: Callable[[str], Iterable[str]]) -> set[str] | None:
    """Return the names in all stores; None if a store can't be read."""
    try:
        return {name for path in stores for name in names(path)}
    except StoreError:
        return None


def _topics(path: str) -> Iterable[str]:
    from librmq.files.disk import DiskFiles
    from librmq.store.format import directory

    return {topic for topic, _ in directory.list_queues(path, DiskFiles())}


def _groups(path: str) -> Iterable[str]:
    from librmq.diagnosis.view import StoreView

    with StoreView.open(path) as view:
        return view.groups


def near(name: str, names: Collection[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name: the nearest known one, ``otherwise`` if none is near."""
    nearest_name = nearest(name, names)
    return f"; did you mean {nearest_name!r}?" if nearest_name is not None else otherwise
