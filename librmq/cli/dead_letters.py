"""``dead-letters``: list dead letters or their causes, or send them to their group again."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from librmq.cli.input import age_clock, parse_time
from librmq.cli.output import Output, complain, whole_number
from librmq.cli.stores import open_broker, open_view
from librmq.cli.unknown_names import note_group
from librmq.diagnosis import letters
from librmq.diagnosis.view import StoreView
from librmq.errors import InputError


def dead_letters(arguments: argparse.Namespace, output: Output) -> int:
    """Print the dead letters, or their causes, or send them to their group again."""
    if arguments.route is not None:
        return _print_of_cluster(arguments, output)
    if arguments.resend:
        if arguments.causes:
            raise InputError("expected either --causes or --resend")
        return _resend(arguments, output)
    if arguments.dry_run:
        raise InputError("--dry-run belongs to --resend: a list changes nothing")
    with open_view(arguments) as view:
        _print(_selected(letters.dead_letters(view, group=arguments.group), arguments), arguments, output)
        note_group(arguments.group, view.groups, output)
    return 0


def _print_of_cluster(arguments: argparse.Namespace, output: Output) -> int:
    from librmq.cli.cluster_source import open_cluster

    if arguments.resend:
        raise InputError("--resend works on the folder of a store: brokers of 4.x have no request for it")
    if arguments.unsent:
        raise InputError("--unsent works on the folder of a store, which notes what was sent again")
    with open_cluster(arguments) as cluster:
        letters_of_brokers = list(cluster.dead_letters(arguments.group))
        selected = _selected((letter for _, letter in letters_of_brokers), arguments)
        if arguments.causes:
            _print(selected, arguments, output)
        else:
            brokers = {id(letter): name for name, letter in letters_of_brokers}
            for letter in selected:
                output.row(cluster.named(brokers[id(letter)], letter._asdict()))
        if arguments.group is not None:
            note_group(arguments.group, cluster.groups(), output)
    return 0


def _print(selected: list[letters.GivenUpMessage], arguments: argparse.Namespace, output: Output) -> None:
    rows: Iterable[letters.DeadLetterCause | letters.GivenUpMessage] = selected
    if arguments.causes:
        rows = letters.sum_up_causes(selected)
    for row in rows:
        output.row(row._asdict())


def _selected(listed: Iterable[letters.GivenUpMessage], arguments: argparse.Namespace) -> list[letters.GivenUpMessage]:
    since_ms = None
    if arguments.since is not None:
        since_ms = parse_time(arguments.since, age_clock(arguments.store, arguments.since))
    return [
        letter
        for letter in listed
        if (arguments.cause is None or arguments.cause in letter.cause)
        and (arguments.id is None or arguments.id == letter.unique_key)
        and (since_ms is None or letter.store_timestamp_ms >= since_ms)
        and (letter.resent_at_ms is None or not arguments.unsent)
    ]


def _resend(arguments: argparse.Namespace, output: Output) -> int:
    """Resend those of the chosen dead letters that were not sent yet, at most ``--limit``; ``--id`` repeats one.

    A dry run does the same in memory.
    """
    if arguments.group is None:
        raise InputError("--resend: name the group with --group")
    with open_broker(arguments) as broker:
        selected = {
            message.physical_offset: message
            for message in _selected(letters.dead_letters(StoreView.of(broker), group=arguments.group), arguments)
        }
        unsent = [
            message
            for message in broker.dead_letters(arguments.group)
            if (letter := selected.get(message.physical_offset))
            and (letter.resent_at_ms is None or arguments.id is not None)
        ]
        if arguments.limit is not None:
            unsent = unsent[: whole_number("--limit", arguments.limit)]
        broker.resend_dead_letters(arguments.group, unsent)
        at_ms = broker.runner.now_ms()
    if not unsent:
        before = (
            f"all {len(selected):,} dead letters were sent before, as resent_at_ms in the list says: name one with "
            "--id to send it once more"
        )
        complain(
            f"note: {before if selected else f'no such dead letter of group {arguments.group!r}'}: nothing is sent"
        )
    for message in unsent:
        letter = selected[message.physical_offset]
        resent_at_ms = letter.resent_at_ms if arguments.dry_run else at_ms
        output.row({**letter._replace(resent_at_ms=resent_at_ms)._asdict(), "resent": not arguments.dry_run})
    return 0
