"""Recorded cases and operations, answered with rows: ``python -m tests.cases load|ask|filter|allocate|bloom``.

The commands behave as those of ``librmq``: exit statuses, ``--config``, a row printed and flushed for each line read,
errors on standard error. They need the installed package and this folder only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from librmq.cli import _syntax as syntax
from librmq.cli._options import OUTPUT, Command, option

COMMANDS: Final[dict[str, Command]] = {command.name: command for command in (
    Command(
        "load", "tests.cases.load", "apply operations from standard input", "copy < operations.jsonl",
        description="Applies operations, one JSON object a line, and prints a row for each acknowledged one: put "
        "and batch append; half begins a transaction, commit or rollback ends it; topic, subgroup, consumer_offset and "
        "filter write the broker's tables, persist saves them; crash exits without closing the store; tx_check "
        "makes one pass over the pending half messages. A message beyond a limit is answered with "
        "MESSAGE_ILLEGAL; a line that is not an operation ends the command with status 2. Only at_ms and sleep "
        "move the store's clock, so two runs with the same operations and times write the same bytes.",
        makes_store=True, output=OUTPUT,
    ),
    Command(
        "ask", "tests.cases.questions", "answer queries from standard input", "store < questions.jsonl",
        description="Answers queries, one JSON object a line. get_message takes topic, queue_id, offset, "
        "max_msg_nums and sub_expression (tags; null for no filter). index_query takes topic, key, max_num, "
        "begin and end, and "
        "answers phys_offsets from the index, newest first, and query_message_phys, the messages found through "
        "them. offset_by_time takes topic, queue_id and timestamps, and answers results, pairs of time and queue "
        "offset, and earliest_message_time.",
        reads=True, output=OUTPUT,
    ),
    Command(
        "filter", "tests.cases.rows", "evaluate filter expressions", "< cases.jsonl",
        (
            option("--dialect", choices=("4.9", "5.3"), default="4.9", help="the grammar (4.9)"),
            option("--strict", action="store_true", help="refuse text after a whole expression, which brokers ignore"),
        ),
        description="Evaluates the cases {expr, props} on standard input, one JSON object a line.",
        store=False, output=OUTPUT,
    ),
    Command(
        "allocate", "tests.cases.rows", "allocate queues, or select one", "< cases.jsonl",
        description="Computes which queues a client consumes, or which queue a message is sent to, as a 4.9 client "
        "does, for one JSON object a line. A queue is [topic, broker, id]; mqs and cids are taken in the given order. "
        "strategy is AVG, AVG_BY_CIRCLE, CONSISTENT_HASH (virtual_nodes, 10), CONFIG (config, the queues that "
        "every client gets), MACHINE_ROOM (consumer_idcs; brokers are named room@broker) or MACHINE_ROOM_NEARBY "
        "(inner, another strategy; the room is the text before the first - of broker and client). selector HASH "
        "takes arg and its arg_type: String, Integer, Long, Double, Boolean or null; selector MACHINE_ROOM "
        "selects nothing, as RocketMQ's.",
        store=False, output=OUTPUT,
    ),
    Command(
        "bloom", "tests.cases.rows", "print the bit positions of strings in a bitmap", "< strings.jsonl",
        description="Prints the bits that strings set in a Bloom filter as a broker's, for one JSON object {f, n, "
        "strings} a line: f is the error rate in percent, n the expected number of strings. A broker uses 20 "
        "and 32, and "
        "strings of the form group#topic.",
        store=False, output=OUTPUT,
    ),
)}  # fmt: skip
"""The commands by name."""

_PUT: Final = "msg_id:str store_timestamp:int queue_offset:int msg_num:int"

ROW_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "load": (f"op:str id?:str status:str append_status?:str phys?:int wrote_bytes?:int {_PUT} ...", "op:str ..."),
    "ask": (
        "type:str topic:str key:str max_num:int begin:int end:int phys_offsets:[int] index_last_update_timestamp:int "
        "index_last_update_phyoffset:int query_message_phys:[int]",
        "type:str topic:str queue_id:int offset:int max_msg_nums:int sub_expression:str? status:str "
        "next_begin_offset:int min_offset:int max_offset:int buffer_total_size:int queue_offsets:[int]",
        "type:str topic:str queue_id:int results:[[int]] earliest_message_time:int",
    ),
    "filter": ("expr:str props:obj? result:any match:bool? ...",),
    "allocate": ("result?:any error_type?:str ...",),
    "bloom": ("k:int m:int positions:[obj]",),
}
"""The forms of the rows of each command."""


def commands_for(words: Sequence[object]) -> Mapping[str, Command]:
    """Return the table of commands that takes these words: that of ``librmq``, or the one on cases."""
    return COMMANDS if words and words[0] in COMMANDS and "--explain" not in words else syntax.COMMANDS
