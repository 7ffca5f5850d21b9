"""A soak: processes send and consume while they are killed and cut off; then their history is judged.

``python -m tests.soak STORE`` runs one, also against a running cluster (``--route``).
"""

from __future__ import annotations

from typing import Final

from librmq.cli.options import OUTPUT, POSITIVE, Command, duration, names, option

COMMANDS: Final[dict[str, Command]] = {command.name: command for command in (
    Command(
        "soak", "tests.soak.command", "send and consume with kills and cuts, and judge what happened",
        "copy --for 2s --every 1s",
        (
            option("--serve", action="store_true", help="serve the store, with clients in processes of their own"),
            option("--for", type=duration, default=30.0, help="how long messages are sent (30s)"),
            option("--rate", metavar="N", type=POSITIVE, help="messages a second (100), at most 2,000"),
            option("--loads", metavar="LIST", type=names, help="some of plain,ordered,delayed,halves (all)"),
            option("--workers", metavar="N", type=POSITIVE, help="processes of clients (2), at most 16"),
            option("--faults", metavar="LIST", type=names, help="some of kill,crash,cut, or none (all possible ones)"),
            option("--every", type=duration, default=5.0, help="time between two faults (5s)"),
            option(
                "--settle", type=duration, default=120.0,
                help="a message that has not come after so long without any other is lost (2m)",
            ),
            option("--name", help="the end of the names of its topics and groups (a random one)"),
            option("-o", "--out", metavar="FILE", help="the file of the history (librmq_soak_NAME.jsonl)"),
        ),
        description="Sends and consumes messages, orders, delays and transactions in topics of its own, kills and cuts "
        "off the processes that do it, and checks the history of all of them. Against a store, which is created if "
        "it does not exist; with --serve against the store over TCP; with --route against a running cluster, whose "
        "brokers are not killed. At most 200,000 messages. Exit status: 0 no anomaly, 1 some, 2 bad input, 130 "
        "interrupted.",
        takes_route=True, makes_store=True, output=OUTPUT[:1],
    ),
)}  # fmt: skip

_FAULTS: Final = "kill?:int crash?:int cut?:int"

_ANOMALY: Final = (
    "anomaly:str at_ms:int id?:any group?:str topic?:str broker?:str queue_id?:int queue_offset?:int "
    "events:[int] what:str"
)

ROW_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "soak": (
        f"type:str seconds:int sent:int failed:int consumed:int {_FAULTS}",
        f"type:str {_ANOMALY}",
        "type:str anomalies:int interrupted:bool sent:int refused:int unknown:int consumed:int retried:int died:int "
        f"{_FAULTS} left:[str] history:str",
    ),
}
"""The forms of the rows."""
