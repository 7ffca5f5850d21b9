"""Open a real broker's store, search it, append to it, die on purpose, recover and verify.

    python examples/demo_store.py [FOLDER]      (or ./demo --store [FOLDER], which makes the environment first)

The store is the one in ``tests/data``, which a RocketMQ 4.9.4 broker wrote. The demo unpacks it to FOLDER
(``demo-output`` by default) and leaves it there, so that you can try the ``librmq`` command. Needs rich: ``pip install
'librmq[cli]'``.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from typing import NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.progress import track
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from librmq import ManualClock, Message, MessageStore, StoredMessage
from librmq.cli._demo import replace_folder
from librmq.commitlog import CommitLog
from librmq.errors import InputError
from librmq.files import Damage, DiskFiles
from librmq.store import recognise, verify

if isinstance(sys.stdout, TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")  # if the output is not UTF-8
CONSOLE = Console(highlight=False)
CONSOLE.width = min(CONSOLE.width, 120)
ARCHIVE = Path(__file__).resolve().parent.parent / "tests" / "data" / "store-basic.tar.xz"
ABOUT = """
broker/     as a RocketMQ 4.9.4 broker left it
continued/  a copy with appended messages, recovered after a kill
damaged/    a copy with one changed bit in the log
"""
TOPIC, KEY = "OrderTopic", "key14"
WANTED = 600  # acknowledged messages before the writer is killed
TORN = 60  # bytes of an incomplete record


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="Shows what librmq does with a broker's store.")
    parser.add_argument("folder", nargs="?", default="demo-output", type=Path, help="the folder to make (demo-output)")
    parser.add_argument("--write-from-ms", type=int, help=argparse.SUPPRESS)  # for the process that is killed
    chosen = parser.parse_args(arguments)
    folder: Path = chosen.folder.absolute()
    if chosen.write_from_ms is not None:
        write_until_killed(folder, chosen.write_from_ms)
    try:
        replace_folder(folder, ABOUT)
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    broker, continued, damaged = folder / "broker", folder / "continued", folder / "damaged"

    CONSOLE.print(Rule("[bold]librmq[/bold]: the store of a message broker, opened without the broker", style="cyan"))
    say(
        "RocketMQ brokers keep their messages in plain files. This demo takes the files of a real 4.9.4 broker, "
        "searches them, appends to them, kills the writer, and recovers."
    )

    step(1, "A broker's directory")
    unpack(folder)
    kind = recognise(str(broker), DiskFiles())
    say(f"Unpacked to [bold]{shown(broker)}[/bold]. librmq recognises it as: [bold]{kind.value}[/bold].")
    show_files(broker)
    with MessageStore.open(broker, read_only=True) as store:
        messages = list(store)
        step(2, "Its queues")
        code("store = MessageStore.open(path, read_only=True)", "store.queues")
        say(
            "Opening for reading takes no lock and changes no byte. A topic has several queues, and messages are "
            "numbered from 0 in each. Names such as %RETRY% and SCHEDULE_TOPIC belong to the broker."
        )
        show_queues(store)

        step(3, "Messages by key, by id, by time")
        code(f"store.find_by_key({TOPIC!r}, {KEY!r})")
        found = store.find_by_key(TOPIC, KEY)
        say(f"The key index finds [bold]{len(found)} of {len(messages)}[/bold] messages, without a search of the log.")
        show_messages(found)
        wanted = found[0].message_id
        code(f"store.find_by_id({wanted!r})")
        show_messages(store.find_by_id(wanted))
        moment = (messages[0].store_timestamp_ms + messages[-1].store_timestamp_ms) // 2
        code(f"at = store.queue_offset_at({TOPIC!r}, 0, {moment})", f"store.read({TOPIC!r}, 0, at, 3).messages")
        say(f"Messages stored in queue 0 around [bold]{time_of(moment)}[/bold]:")
        show_messages(store.read(TOPIC, 0, store.queue_offset_at(TOPIC, 0, moment), 3).messages)

    step(4, "Continuing where the broker stopped, and dying")
    shutil.copytree(broker, continued)
    now_ms = messages[-1].store_timestamp_ms + 60_000  # a minute after the broker's last message
    code(f"store.append(Message({TOPIC!r}, body, keys=…), queue_id)")
    say(
        f"Another process opens a copy, [bold]{shown(continued)}[/bold], and appends as fast as it can. A message is "
        "acknowledged once its record is in the log. In the middle of this the demo kills the process (kill -9)."
    )
    acknowledged = append_in_a_process_that_dies(continued, now_ms)
    tear(continued, acknowledged[-1])
    say(
        f"[bold]{len(acknowledged):,}[/bold] messages were acknowledged. Queues and index are written in batches, so "
        f"the last messages can be missing there. To make it worse, the demo added {TORN} bytes of an incomplete "
        "record, as a power failure leaves them. verify finds:"
    )
    code("verify(path)")
    show_damage(continued, verify(str(continued)).damage)

    logging.getLogger("librmq").addHandler(logging.NullHandler())  # the screen shows the same
    step(5, "Recovery")
    code("store = MessageStore.open(path)", "store.recovered")
    say("Opening recovers: the abort marker shows that the store was not closed. The recovery cut or rewrote:")
    with MessageStore.open(continued, clock=ManualClock(now_ms + 60_000)) as store:
        show_damage(continued, store.recovered)
        recovered = {message.physical_offset: message for message in store}
        kept = sum(offset in recovered for offset in acknowledged)
        same = sum(recovered.get(message.physical_offset) == message for message in messages)
        keyed = sum(len(store.find_by_key(TOPIC, key_of(number))) for number in range(1, len(acknowledged) + 1))
        result = store.append(Message(TOPIC, b"the first after the crash", keys="after"), 0)
    sound = verify(str(continued)).sound
    everything = len(acknowledged)
    answers(
        (same == len(messages), f"{same:,} of the broker's {len(messages):,} messages are there, byte for byte"),
        (kept == everything, f"{kept:,} of {everything:,} acknowledged messages are there"),
        (keyed == everything, f"{keyed:,} of {everything:,} are found by their keys"),
        (result.queue_offset > 0, f"writing continues: the next message is number {result.queue_offset} of queue 0"),
        (sound, "the store was closed, and verify finds no damage"),
    )

    step(6, "One changed byte")
    shutil.copytree(broker, damaged)
    change_a_byte(damaged, found[-1])
    say(
        f"In a third copy, [bold]{shown(damaged)}[/bold], the demo flips one bit of one message's body. Bodies have a "
        "checksum, so verify finds it. An unreadable record ends the log, so verify also reports the entries, keys and "
        "times of the records behind it:"
    )
    code("verify(path)")
    damage = verify(str(damaged)).damage
    show_damage(damaged, damage)

    step(7, "Folders and next steps")
    show_places(folder)
    say("The librmq command does all of this from a shell, with tables on a terminal and JSON lines in a pipe:")
    command = shown(Path(sys.executable).parent / "librmq")
    code(
        f"{command} queues {shown(broker)}",
        f"{command} query {shown(broker)} --topic {TOPIC} --key {KEY}",
        f"{command} query {shown(continued)} --topic {TOPIC} --key {key_of(500)}",
        f"{command} dump {shown(broker)} | head -2",
        f"{command} verify {shown(damaged)}",
        f"{command} recover {shown(damaged)}",
        f"{command} broker-conf {shown(continued)}",
    )
    say(
        "Take care with recover: like the broker, it cuts the log at the first unreadable record, with all records "
        "behind it. The tutorial is docs/store.md; docs/cli.md describes the commands."
    )
    CONSOLE.print()
    CONSOLE.print(Rule(style="cyan"))
    return 0 if sound and damage and kept == keyed == everything and same == len(messages) else 1


# ------------------------------------------------------------------------------------------------- what is done


def unpack(folder: Path) -> None:
    """Unpack the broker's store to ``folder/broker``."""
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        for member in archive:
            inside = Path(member.name).parts
            content = archive.extractfile(member)
            if inside[:2] == ("store-basic", "store") and ".." not in inside and content is not None:
                path = folder.joinpath("broker", *inside[2:])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())


def key_of(number: int) -> str:
    return f"demo-{number}"


def write_until_killed(path: Path, now_ms: int) -> None:
    """Append until the process is killed, and print each acknowledged physical offset."""
    clock = ManualClock(now_ms)  # so that the demo does not depend on this machine's time
    store = MessageStore.open(path, clock=clock)
    for number in count(1):
        clock.advance(ms=1)
        body = f"order {number}, appended by librmq".encode()
        message = Message(TOPIC, body, tags="demo", keys=key_of(number))
        print(store.append(message, number % 2).physical_offset, flush=True)


def append_in_a_process_that_dies(path: Path, now_ms: int) -> list[int]:
    """Start the writer, kill it, and return the physical offsets that it had acknowledged."""
    command = [sys.executable, __file__, str(path), "--write-from-ms", str(now_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        first = [
            writer.stdout.readline()
            for _ in track(
                range(WANTED), "  appending", console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal
            )
        ]
        writer.kill()
        rest = writer.stdout.readlines()  # printed before the kill took effect
    return [int(line) for line in first + rest if line.endswith(b"\n")]


def tear(path: Path, some_record: int) -> None:
    """Put the first bytes of a record after the log's end."""
    folder = path / "commitlog"
    size = min(folder.iterdir()).stat().st_size
    for made in folder.iterdir():
        os.truncate(made, size)  # the kill can have left the last file too long
    with CommitLog.open(str(folder), size, writable=False) as log:
        end, raw = log.end, log.read(some_record)
    assert raw is not None
    with (folder / f"{end - end % size:020d}").open("r+b") as file:
        file.seek(end % size)
        file.write(raw[: min(TORN, size - end % size)])


def change_a_byte(path: Path, message: StoredMessage) -> None:
    """Flip one bit of a message's body in the log file."""
    folder = path / "commitlog"
    size = min(folder.iterdir()).stat().st_size
    place = message.physical_offset + message.raw.index(message.stored_body)
    with (folder / f"{place - place % size:020d}").open("r+b") as file:
        file.seek(place % size)
        byte = file.read(1)[0]
        file.seek(place % size)
        file.write(bytes((byte ^ 1,)))


# ------------------------------------------------------------------------------------------------ what is shown


def step(number: int, title: str) -> None:
    CONSOLE.print()
    CONSOLE.print()
    CONSOLE.print(Rule(f"[bold cyan]{number}[/bold cyan]  [bold]{title}[/bold]", align="left", style="dim"))


def say(text: str) -> None:
    CONSOLE.print(Padding(text, (1, 2, 0, 2), expand=False))


def code(*lines: str) -> None:
    CONSOLE.print()
    for line in lines:
        CONSOLE.print(Text(f"    {line}", style="green"), soft_wrap=True)


def answers(*rows: tuple[bool, str]) -> None:
    made = Table.grid(padding=(0, 1))
    for good, text in rows:
        made.add_row("[bold green]yes[/]" if good else "[bold red]NO[/]", text)
    draw(made)


def table(*columns: str) -> Table:
    """Return an empty table; columns that begin with # hold numbers, and the last one takes the remaining width."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", border_style="dim")
    for name in columns:
        number = name.startswith("#")
        last = name == columns[-1]
        made.add_column(
            name.lstrip("#"),
            justify="right" if number else "left",
            no_wrap=not last,
            overflow="ellipsis" if not last else "fold",
        )
    return made


def draw(made: Table) -> None:
    CONSOLE.print(Padding(made, (1, 0, 0, 4), expand=False))


def show_files(path: Path) -> None:
    made = table("path", "#files", "#bytes", "what it holds")
    for name, what in (
        ("commitlog", "every message of every topic, one after the other"),
        ("consumequeue", "for each queue, the places of its messages in the log"),
        ("index", "hash tables from keys and ids to the log"),
        ("config", "topics, groups, and the progress of each group"),
        ("checkpoint", "times up to which everything is on the disk"),
        ("lock", "locked by the writer"),
    ):
        files = [path / name] if (path / name).is_file() else [one for one in (path / name).rglob("*") if one.is_file()]
        made.add_row(
            name + ("/" if (path / name).is_dir() else ""),
            str(len(files)),
            f"{sum(one.stat().st_size for one in files):,}",
            what,
        )
    draw(made)


def show_queues(store: MessageStore) -> None:
    made = table("topic", "#queue", "#first", "#next", "last stored")
    for (topic, queue_id), queue in sorted(store.queues.items()):
        last = queue.entry(queue.max_offset - 1)
        stored = None if last is None else store.log.store_timestamp_ms(last.physical_offset)
        made.add_row(
            Text(short(topic, 34)),
            str(queue_id),
            str(queue.min_offset),
            str(queue.max_offset),
            "" if stored is None else time_of(stored)[11:],
        )
    draw(made)


def show_messages(messages: Iterable[StoredMessage]) -> None:
    made = table("stored (UTC)", "#queue", "#number", "tag", "keys", "body")
    width = max(16, CONSOLE.width - 60)
    for message in messages:
        made.add_row(
            time_of(message.store_timestamp_ms)[11:],
            str(message.queue_id),
            str(message.queue_offset),
            Text(message.tags or ""),
            Text(short(" ".join(message.keys), 12)),
            Text(short(message.body.decode(errors="replace"), width), no_wrap=True, overflow="ellipsis"),
        )
    draw(made)


def show_damage(store: Path, damage: Sequence[Damage]) -> None:
    """Draw a row for each kind of damage in each part of the store, with the first of that kind."""
    parts = Counter((part_of(store, one), one.kind) for one in damage)
    made = table("#found", "kind", "the first of them")
    for (part, kind), number in parts.items():
        first = next(one for one in damage if (part_of(store, one), one.kind) == (part, kind))
        name = Path(first.file).relative_to(store).as_posix()
        made.add_row(str(number), kind, Text(f"{name} at {first.offset}: {first.what}"))
    draw(made)


def part_of(store: Path, damage: Damage) -> str:
    return Path(damage.file).relative_to(store).parts[0]


def show_places(folder: Path) -> None:
    made = table("folder", "what it is")
    for name, what in (
        ("broker", "the broker's store, unchanged"),
        ("continued", "the copy with appended messages, recovered after a kill; sound"),
        ("damaged", "the copy with one changed bit"),
    ):
        made.add_row(shown(folder / name), what)
    draw(made)


def time_of(timestamp_ms: int) -> str:
    return f"{datetime.fromtimestamp(timestamp_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}.{timestamp_ms % 1000:03d}"


def short(text: str, length: int) -> str:
    """Return text from a message on one line, with control characters escaped."""
    line = repr(text)[1:-1]
    return line if len(line) <= length else line[: length - 1] + "…"


def shown(path: Path) -> str:
    """Return a path relative to the current folder if possible."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def run_part(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a part of the demo as a program; Ctrl-C ends it with status 130 and without a traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run_part(main)
