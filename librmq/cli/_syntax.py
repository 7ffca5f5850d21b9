"""Names, summaries, examples and arguments of all commands; loads nothing that a command needs to run."""

from __future__ import annotations

import argparse
from typing import Final

from librmq.cli._options import (
    AS_RECOVERED,
    CHANGES,
    GREP,
    GROUP,
    LOG_PATH,
    OUTPUT,
    POSITIVE,
    SECURED,
    SELECTION,
    SQL,
    STORAGE_OPTIONS,
    TAG,
    TIME_HELP,
    TIMES,
    TOPIC,
    Command,
    address,
    decimal,
    duration,
    names,
    option,
    pair,
    whole,
)

_ALL: Final = option(
    "--all", action="store_true", help="include the broker's own topics; count: retries and dead letters too"
)
_ALL_GROUPS: Final = option("--all", action="store_true", help="include the broker's own groups")
_IMPORTANT: Final = option(
    "--important", metavar="TOPIC", action="append", help="report warnings about this topic as errors; repeatable"
)
_BODY: Final = option(
    "--body", choices=("text", "json", "hex", "base64", "none"), default="text", help="how to print bodies (text)"
)
_GROUP_AND_TOPIC: Final = (
    option("--group", required=True, help="the consumer group"),
    option("--topic", required=True, help="the topic"),
)

_ENTRIES: Final = "The numbers count entries of queues, whose records can be damaged: `librmq verify` reads each."

_QUEUE_COUNT: Final = whole(1, 65_536)
_UP_TO_1024: Final = whole(1, 1024)
_PORT: Final = whole(0, 65_535)

_LOOK: Final = (
    Command("topics", "topics", "list the topics, their messages and times", "store", note=_ENTRIES, takes_route=True),
    Command(
        "show", "messages", "print messages: by topic, key, tag, text, time …", "store --topic OrderTopic --limit 3",
        (*SELECTION, _BODY),
        takes_route=True,
    ),
    Command(
        "tail", "messages", "print the last messages; with -f also new ones", "store --topic OrderTopic",
        (
            option("-n", "--count", metavar="N", type=POSITIVE, default="10", help="number of messages (10)"),
            option("-f", "--follow", action="store_true", help="also print new messages, until interrupted"),
            _ALL,
            *SELECTION,
            _BODY,
        ),
    ),
    Command(
        "count", "topics", "count messages by topic, tag, key, hour …", "store --by tag",
        (
            option(
                "--by", choices=("topic", "queue", "tag", "key", "minute", "hour", "day"), default="topic",
                help="one row for each of these (topic)",
            ),
            option(
                "--sampled", action="store_true",
                help="--by tag: read the queues, and a sample of the log; a rare tag can count as another of its hash",
            ),
            _ALL,
            *SELECTION,
        ),
        note=_ENTRIES,
    ),
    Command(
        "groups", "groups", "list the consumer groups, their lag and dead letters", "store",
        (_ALL_GROUPS,),
        note=_ENTRIES, takes_route=True,
    ),
    Command(
        "lag", "groups", "print how many messages each group has left to consume", "store --group CG_order",
        (
            GROUP,
            _ALL_GROUPS,
            option("--topic", help="only this topic"),
            option(
                "--by", choices=("queue", "topic", "group", "origin"), default="queue",
                help="one row for each of these (queue); origin tells new messages from delayed ones and retries",
            ),
            option(
                "--every", type=duration,
                help="print rates instead, measured every TIME (10s) by group and topic, until interrupted",
            ),
        ),
        note=_ENTRIES, takes_route=True,
    ),
    Command(
        "expiring", "groups", "list unconsumed messages that retention deletes soon",
        "store --reserved 72h --within 6h",
        (
            option("--reserved", type=duration, default="72h", help="how long the broker keeps log files (72h)"),
            option("--within", type=duration, default="6h", help="only what expires within this time (6h)"),
        ),
    ),
    Command(
        "dead-letters", "groups", "list dead letters or their causes, or resend them", "store --causes",
        (
            GROUP,
            option("--causes", action="store_true", help="sum up by group, topic and cause"),
            option("--cause", metavar="TEXT", help="only letters whose cause contains this text, # for numbers"),
            option("--id", help="only the message with this unique id"),
            option("--since", metavar="TIME", help=f"given up at this time or later; {TIME_HELP}"),
            option("--unsent", action="store_true", help="only letters that --resend has not sent yet"),
            option("--resend", action="store_true", help="send those not sent yet to --group again, with all retries"),
            *CHANGES,
        ),
        takes_route=True,
    ),
    Command(
        "story", "diagnosis", "print the history of a message", "store key14",
        (
            option("id", help="a unique id, an offset id, or a key"),
            option("--topic", help="with a key: search only this topic"),
        ),
    ),
    Command(
        "traces", "diagnosis", "print by which instance messages were consumed, and when",
        "store --group CG_order",
        (
            option("--id", help="only traces of this message"),
            option("--group", help="only traces of this producer or consumer group"),
            option("--trace-topic", metavar="TOPIC", action="append",
                   help="a topic of traces; repeatable (those whose name or newest message says so)"),
        ),
    ),
    Command(
        "diagnose", "diagnosis", "list problems of topics and groups, worst first", "store",
        (
            _IMPORTANT,
            option(
                "--verify", action=argparse.BooleanOptionalAction,
                help="compare queues and index with the log (by default of up to 30,000 messages)",
            ),
            option("--design", action="store_true", help="only problems in the design of topics, keys and groups"),
            option("--volumes", action="store_true", help="list the topics by size instead"),
        ),
        takes_route=True,
    ),
    Command(
        "top", "groups", "show live what groups, instances and listeners do", "store --once",
        (
            option("--every", type=duration, default="2s", help="time between two looks (2s)"),
            option("--once", action="store_true", help="look once, without rates"),
        ),
        takes_route=True,
    ),
    Command("stats", "topics", "print how much the store holds, in one row", "store", note=_ENTRIES, output=OUTPUT),
    Command(
        "disk", "topics", "print what fills the disk, by kind of file and by topic", "store", (AS_RECOVERED,),
        note="What happens at each share of the disk; when the log's growth reaches it, and why old files stay, on "
        "standard error.",
    ),
    Command(
        "whatif", "groups", "estimate the time to drain a backlog",
        "store --group CG_order --topic OrderTopic --handler 20ms",
        (
            *_GROUP_AND_TOPIC,
            option("--handler", type=duration, required=True, help="mean duration of a listener's call (20ms)"),
            option("--clients", metavar="N", type=_UP_TO_1024, help="instances of the group (1)"),
            option("--threads", metavar="N", type=_UP_TO_1024, help="listeners in parallel in each instance (20)"),
            option("--batch", metavar="N", type=_UP_TO_1024, help="messages per call (1)"),
            option("--orderly", action="store_true", help="consume each queue in order"),
            option("--inflow", metavar="N", type=decimal, help="new messages per second (as in the last ten minutes)"),
            option(
                "--downstream", metavar="N", type=decimal,
                help="messages per second that the services behind the listeners can take (no limit)",
            ),
        ),
    ),
    Command("queues", "topics", "list the queues and their offsets", "store"),
    Command(
        "query", "messages", "find messages by key or by id, as a broker does", "store --topic OrderTopic --key key14",
        (
            option("--topic", help="with --key: the topic to search"),
            option("--key", help="a key or unique id of the messages"),
            option("--begin", metavar="TIME", help=f"earliest store time; {TIME_HELP}"),
            option("--end", metavar="TIME", help="latest store time"),
            option("--max", metavar="N", type=POSITIVE, default="64", help="maximum number of messages (64)"),
            option("--id", help="instead of a key: an offset id (32 or 56 hex digits) or a unique id"),
        ),
    ),
    Command(
        "progress", "groups", "print where groups were: file, backup, moves, snapshots",
        "store --group CG_order",
        (
            GROUP,
            _ALL_GROUPS,
            TOPIC,
            option("--beside", metavar="FOLDER", action="append",
                   help="a snapshot or an earlier copy of the store, to compare with; repeatable"),
        ),
    ),
    Command(
        "pending", "groups", "list messages that wait for a time, a transaction or an acknowledgement",
        "store --kind delay",
        (
            option(
                "--kind", choices=("half", "given_up", "delay", "retry", "timer", "pop", "schedule"),
                help="only this kind",
            ),
            option("--topic", help="only messages for this topic"),
        ),
    ),
    Command("schedules", "groups", "list schedules, and when each sends next", "store"),
)  # fmt: skip

_OF_GROUP: Final = (*_GROUP_AND_TOPIC, option("--queue", metavar="IDS", help="only these queues (3, or 0,3,5-9)"))

_PLACE: Final = option("place", help="the folder of a store, or the HOST:PORT of a cluster's name server")

_CHANGE: Final = (
    Command(
        "send", "shell", "send a message, or each line of standard input", "store orders hello",
        (
            _PLACE,
            option("topic", help="the topic"),
            option("body", nargs="?", help="the body; - or none: standard input"),
            option("--create", action="store_true", help="make the store if there is none"),
            option("--lines", action="store_true", help="send each line of standard input as a message"),
            option("--tag", help="its tag"),
            option("--key", action="append", help="a business key; repeatable"),
            option("--delay", type=duration, help="deliver it so much later"),
            option("--property", type=pair, action="append", metavar="NAME=TEXT", help="a property; repeatable"),
            *SECURED,
        ),
        note="A folder is shared with the processes that use it by librmq.share or by these commands.",
        store=False, output=OUTPUT,
    ),
    Command(
        "consume", "shell", "print messages for a group, or run a program for each",
        "store orders --group billing --max 1",
        (
            _PLACE,
            option("topic", help="the topic"),
            option("--group", required=True, help="the consumer group; a new one begins at the first message"),
            option("--max", metavar="N", type=POSITIVE, help="end after so many attempts, failed ones included"),
            option("--until-end", action="store_true", help="end where topic and due retries ended at the start"),
            *SECURED,
        ),
        description="Prints a line of JSON for each message, which counts as consumed once it is written. With "
        "-- COMMAND it runs that for each message, the body on standard input, the rest in variables "
        "MESSAGE_…: status 0 acknowledges, any other is a retry, with the last line of its errors as the cause.",
        store=False, output=(), runs_program=True,
    ),
    Command(
        "topic", "administration", "create a topic, add queues, or delete it", "create store orders --queues 4",
        (
            option("topic", help="the topic"),
            option("--queues", metavar="N", type=_QUEUE_COUNT, help="number of queues (create: 8)"),
            option(
                "--write-queues", metavar="N", type=_QUEUE_COUNT, help="number of queues that accept messages (all)",
            ),
            option("--permission", choices=("rw", "r", "w"), help="create, permit: allow reads, writes or both (rw)"),
            option(
                "--type", choices=("NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"),
                help="create: what official clients of 5.x may send (MIXED)",
            ),
            *CHANGES,
        ),
        actions=("create", "grow", "permit", "delete"), output=OUTPUT,
    ),
    Command(
        "group", "administration", "create a group, copy it to a new name, or delete it",
        "copy store CG_order --to billing",
        (
            option("group", help="the group; copy: the old group"),
            option(
                "--retries", metavar="N", type=whole(0, 9_999_999), help="create: maximum retries of a message (16)",
            ),
            option(
                "--ordered", action=argparse.BooleanOptionalAction,
                help="create: receive each queue in order, as a FIFO topic needs (no)",
            ),
            option("--consumes", action=argparse.BooleanOptionalAction, help="create: let the group consume (yes)"),
            option("--broadcasts", action=argparse.BooleanOptionalAction, help="create: allow broadcasting (yes)"),
            option(
                "--priority-factor", metavar="N", type=whole(0, 100),
                help="create: percentage of receives that begin with the highest priority (100)",
            ),
            option(
                "--max-process-deaths", metavar="N", type=whole(0, 100),
                help="create: ends of its process before a message is a dead letter; 0: never (3)",
            ),
            option("--to", metavar="NEW", help="copy: the new group, which starts at the old group's progress"),
            option(
                "--with-retries", action="store_true", default=None,
                help="copy: move the retries that wait to the new group",
            ),
            *CHANGES,
        ),
        actions=("create", "copy", "delete"), output=OUTPUT,
    ),
    Command(
        "reset", "administration", "set a group's progress to begin, end, time, offset",
        "store --group CG_order --topic OrderTopic --to end",
        (
            *_OF_GROUP,
            option("--to", metavar="WHERE", help="begin, end, or a time: the first message stored then or later"),
            option("--offset", metavar="N", help="a queue offset"),
            *CHANGES,
        ),
        takes_route=True, output=OUTPUT,
    ),
    Command(
        "skip", "administration", "move a group forward past old messages",
        "store --group CG_order --topic OrderTopic --keep 10",
        (
            *_OF_GROUP,
            option("--older-than", metavar="AGE", type=duration, help="skip messages stored longer ago than this (2h)"),
            option("--keep", metavar="N", help="leave the last N messages of each queue (0)"),
            option("--aside", metavar="TOPIC", help="first copy the skipped messages to this topic"),
            option("--move", metavar="TOPIC", help="the same, and the group continues with the copies in this topic"),
            option("--queues", metavar="N", type=_QUEUE_COUNT, help="with --move: number of queues of a new topic"),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "replay", "replay", "start a group where a skip began, or fill a cluster",
        "store --group CG_order --topic OrderTopic --to again",
        (
            option("--group", help="the consumer group that has skipped messages"),
            option("--to", metavar="GROUP", help="the second group"),
            option("--route", metavar="HOST:PORT", help="send the store's messages to the cluster of this name server"),
            *SECURED,
            option("--to-topic", metavar="TOPIC", help="send messages, or the dead letters of --group, to this topic"),
            option("--from-start", action="store_true", help="do not continue where the last call ended"),
            *(argument for argument in SELECTION if argument.names[0] not in ("--key", "--id")),
            *CHANGES,
        ),
        description="Starts a second group where a group's last skip of a topic began: --group, --topic and --to. Or, "
        "with --route or --to-topic, sends the selected messages to a running cluster or to another topic; a repeated "
        "call continues where the last one ended.",
        output=OUTPUT,
    ),
    Command(
        "decide", "groups", "commit or roll back a given-up half message", "store 280252 --rollback",
        (
            option(
                "physical_offset", metavar="OFFSET", type=whole(),
                help="its physical offset in `pending --kind given_up`",
            ),
            option("--commit", action="store_true", help="deliver the message"),
            option("--rollback", action="store_true", help="drop the message"),
            option(
                "--force", action="store_true",
                help="decide an open half too, which checks still ask about; the store must not be in use",
            ),
            *CHANGES,
        ),
        output=OUTPUT,
    ),
    Command(
        "cancel", "groups", "cancel a message that waits for its time", "store 7F0000010D3218B4AAC226E608000071",
        (option("id", help="its unique id or offset id"), *CHANGES),
        description="Cancels a message of a delay level, the timer or the relay, in a store that no broker has open. "
        "The answer says whether it is cancelled, or why not: most often it was delivered already.",
        output=OUTPUT,
    ),
    Command(
        "import", "import_export", "append messages that export wrote", "copy orders.jsonl",
        (
            option("path", help="a file of JSON lines or CSV, a folder of Parquet, or - for stdin"),
            option(
                "--input-format", choices=("parquet", "csv", "jsonl"),
                help="format of PATH (by its ending, else jsonl)",
            ),
            option("--skip", metavar="N", default="0", help="skip the first N rows"),
            *CHANGES,
        ),
        description="Appends exported messages to a store, and creates the store if it does not exist. In an empty "
        "store the messages keep their store times; otherwise they get the present time.",
        makes_store=True, output=OUTPUT,
    ),
    Command(
        "settings", "maintenance", "print the settings that a store keeps, or change one",
        "store --set durability=sync --dry-run",
        (
            option("--set", action="append", type=pair, metavar="NAME=VALUE", help="record this value; repeatable"),
            *CHANGES,
        ),
        description="Prints the settings that processes have named for all later ones: durability, timers, retention, "
        "limits. --set changes them on purpose, in a store that no process uses. A value is JSON, or text.",
    ),
    Command(
        "recover", "maintenance", "recover the store as a broker would", "store --dry-run",
        CHANGES,
        description="Recovers the store in place from the whole log and closes it cleanly. Like a broker, it cuts the "
        "log at the first unreadable record; what it cuts is first copied to librmq/salvage in the store.",
        output=OUTPUT,
    ),
)  # fmt: skip

_TARGET: Final = option("target", help="a folder that is empty or does not exist")

_FILES: Final = (
    Command("verify", "maintenance", "check the bytes of all files; changes nothing", "store", output=OUTPUT),
    Command(
        "can-start", "maintenance", "say if a broker starts here, repairs, or refuses, and why", "store",
        note="By the rules of RocketMQ 4.9.4 or 5.3.3: tables and their backups, lengths of files, where a recovery "
        "reads the log, how long this disk takes for that, and what is cut. Changes nothing.",
    ),
    Command(
        "salvage", "maintenance", "extract every sound record of a damaged store", "store --into saved",
        (option("--into", metavar="NEW", help="write the records to a new store instead of printing them"),),
        description="Prints every sound record of the log, whatever is damaged or missing, a row for each gap, "
        "then the records in librmq/salvage without repetitions. A new store numbers the messages of each queue from 0 "
        "without a gap, and adjusts the progress of groups, delay levels and transactions.",
    ),
    Command(
        "extract", "maintenance", "make a small store of selected messages",
        "store --topic OrderTopic --key key14 -o small",
        (
            option("-o", "--out", metavar="NEW", required=True, help="the new store, a folder that does not exist"),
            option(
                "--redact", choices=("bodies", "properties"), action="append",
                help="hide bodies, or the values of an application's properties; tags and keys stay; repeatable",
            ),
            option("--limit", metavar="N", type=POSITIVE, help="extract at most the first N messages"),
            *SELECTION,
        ),
        description="Copies the selected messages with their ids and times, and numbers the messages of each queue "
        "from 0. Topics, progress and filters go with them. The files are as small as the messages allow, to keep such "
        "a store beside a test.",
        output=(),
    ),
    Command(
        "snapshot", "maintenance", "copy a store that may be in use", "store saturday",
        (_TARGET, option("--copy", action="store_true", help="copy every file instead of linking")),
        output=OUTPUT,
    ),
    Command(
        "follow", "maintenance", "keep a copy of a store that another process writes", "store copy --until-end",
        (
            option("copy", help="the folder of the copy; it may be an earlier copy of this store"),
            option("--until-end", action="store_true", help="copy what there is now, and exit"),
        ),
        description="Copies the log byte for byte as it grows, and topics, groups and progress every 10 s. Runs until "
        "interrupted. Prints a line when the copy is current, and when the store becomes unreadable or readable again.",
        output=OUTPUT[:1],
    ),
    Command(
        "restore", "maintenance", "create a store from a snapshot", "store again",
        (_TARGET,),
        output=OUTPUT,
    ),
    Command(
        "export", "import_export", "write messages to Parquet, CSV or JSON lines", "store -o orders.jsonl",
        (
            option(
                "--format", dest="file_format", choices=("parquet", "csv", "jsonl"),
                help="format of PATH (by its ending, else parquet)",
            ),
            option("-o", "--out", metavar="PATH", required=True, help="a new folder for Parquet, else a new file"),
            option("--topic", action="append", help="only this topic; repeatable"),
            option("--all", action="store_true", help="include retries, dead letters and the broker's own topics"),
            option(
                "--queue", metavar="ID", type=whole(), action="append",
                help="only this queue of the topics; repeatable",
            ),
            TAG,
            SQL,
            GREP,
            *TIMES,
            option("--columns", metavar="A,B", type=names, help="only these columns"),
            option("--partition-by", metavar="A,B", type=names, help="with Parquet: folders by topic, queueId or date"),
        ),
        output=(),
    ),
    Command(
        "dump", "messages", "print every record of the log", "store --limit 5",
        (option("--all", action="store_true", help="continue after damage if possible"),),
    ),
    Command(
        "queue", "topics", "print the entries of a queue", "store OrderTopic 0",
        (
            option("topic", help="the queue's topic"),
            option("queue_id", metavar="ID", type=whole(), help="the queue's number"),
        ),
    ),
    Command("timers", "groups", "print the files of RocketMQ 5's timer", "store"),
    Command("broker-conf", "maintenance", "print settings for a broker that opens the store", "store", output=()),
)  # fmt: skip

_STORES: Final = option("stores", metavar="STORE", nargs="+", help="the folders of the stores, or their URLs")
_MASTER: Final = option("--master", metavar="URL", default="local[*]", help="Spark's master (local[*])")
_RANGES: Final = (TOPIC, GROUP, TAG, *TIMES)

_TOOLS: Final = (
    Command(
        "report", "diagnosis", "write a page about stores: what to look at, lag, rates", "store --out report.html",
        (
            _STORES,
            option("-o", "--out", metavar="FILE", default="report.html", help="the page (report.html); JSON is beside"),
            option("--compare", metavar="JSON", help="the JSON of an earlier report: also show changes and rates"),
            option(
                "--verify", action=argparse.BooleanOptionalAction,
                help="check every record of large stores too (default: up to 300,000 messages)",
            ),
            AS_RECOVERED,
            LOG_PATH,
            option("--spark", action="store_true", help="read the stores with Spark, which can be a cluster"),
            *_RANGES,
            STORAGE_OPTIONS,
            _MASTER,
        ),
        description="Writes one page that opens offline, and the same as JSON beside it (extras: report, arrow).",
        store=False, output=(),
    ),
    Command(
        "check-history", "histories", "find what is wrong in the recorded history of a run", "- < history.jsonl",
        (
            option("files", metavar="FILE", nargs="+", help="JSON lines of events, one file a process, or - for stdin"),
            option("-o", "--out", metavar="PAGE", help="also write a page with a timeline of each anomaly"),
            option("--to", choices=("jepsen",), help="print the history for the checker of Jepsen's Kafka workload"),
        ),
        description="Prints a line for each anomaly of a history, by time; all files together are one history. Exit "
        "status: 0 none, 1 some, 2 bad input. In `events` are the numbers of the lines that show it, counted through "
        "the files.",
        store=False, output=OUTPUT[:1],
    ),
    Command(
        "spark", "diagnosis", "run a pipeline over stores with Spark", "list",
        (
            option("action", choices=("list", "run"), help="list the pipelines, or run one"),
            option("name", nargs="?", help="run: the pipeline"),
            option("stores", metavar="STORE", nargs="*", help="run: the folders of the stores"),
            option("-o", "--out", metavar="FOLDER", help="write the rows there as Parquet, not to the output"),
            option("--overwrite", action="store_true", help="replace an existing folder"),
            option("--append", action="store_true", help="keep each run, as a partition run=TIME of the folder"),
            option("--incremental", action="store_true", help="read only what is new since the last such run"),
            option("--partition-by", metavar="COLUMNS", type=names, help="make folders by the values of columns"),
            option("--set", action="append", type=pair, metavar="NAME=VALUE", help="a setting of the pipeline"),
            *_RANGES,
            _MASTER,
        ),
        description="Runs a pipeline over one store or a cluster's; `librmq spark list` lists them (extra: spark).",
        store=False, output=OUTPUT[:1],
    ),
    Command(
        "serve", "serve", "serve a store to official clients of RocketMQ", "store --grpc 8081 --remoting 9876",
        (
            option("--grpc", type=_PORT, metavar="PORT", help="port for clients of RocketMQ 5; 0 takes a free one"),
            option("--grpc-tls", type=_PORT, metavar="PORT", help="a second port for them, with TLS"),
            option("--grpc-calls", type=int, metavar="N", help="open gRPC calls of one address (320)"),
            option(
                "--min-invisible", type=float, metavar="SECONDS",
                help="take gRPC receives with an invisible time from here on (10)",
            ),
            option(
                "--min-polling", type=float, metavar="SECONDS",
                help="take gRPC receives whose deadline leaves this time (5); 0 takes all",
            ),
            option("--remoting", type=_PORT, metavar="PORT", help="port for clients of 4.x; 0 takes a free one"),
            option("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine only)"),
            option(
                "--advertise", metavar="HOST[:PORT]", type=address,
                help="the address in routes (what the client dialled); the PORT is gRPC's where both are served"
            ),
            option("--admin", action="store_true", help="let other machines change topics and groups"),
            option(
                "--tls", nargs="*", metavar=("CERT", "KEY"),
                help="serve TLS with a certificate and its key, two PEM files; without them with a self-signed pair",
            ),
            option(
                "--no-auto-create", action="store_true",
                help="create no topic when a client of RocketMQ 5 asks for its route",
            ),
            option(
                "--clock", choices=("system", "manual"), default="system",
                help="manual: time moves only by requests to the control port, for tests in any language",
            ),
            option("--control", type=_PORT, metavar="PORT", help="control port of --clock manual (a free one)"),
            option(
                "--end-with-input", action="store_true",
                help="end when standard input ends, as it does when the process that holds its pipe has ended",
            ),
        ),
        description="Serves the store until interrupted, and creates it if it does not exist. Without a port: gRPC "
        "on 8081 if the extra grpc is installed, and remoting (4.x) on 9876. Prints a line when ready, then one for "
        "each client that connects or leaves.",
        makes_store=True, output=OUTPUT[:1],
    ),
    Command(
        "console", "console", "show a store or a cluster in the browser", "store --port 0",
        (
            _PLACE,
            option("--port", metavar="N", type=_PORT, default="0", help="the port (a free one)"),
            option(
                "--allow-changes", action="store_true",
                help="let the pages resend dead letters, cancel, reset, skip; each change is shown first",
            ),
            option("--no-bodies", action="store_true", help="show no bodies of messages"),
            LOG_PATH,
            *SECURED,
        ),
        description="Prints a link to open, and serves the pages to this machine until interrupted. A store that a "
        "process shares is changed through that process; any other is only read (extra: console).",
        store=False, output=OUTPUT[:1],
    ),
    Command(
        "who", "maintenance", "list the processes that share a store", "store",
        note="The process that owns it, then those that reach it through its socket; a stopped one is marked.",
        output=OUTPUT,
    ),
    Command(
        "demo", "librmq.cli._demo", "show a shop at work, with its code; or kill a producer, and count",
        "kill --seed 1",
        (
            option(
                "what", metavar="WHAT", nargs="?", choices=("shop", "kill"), default="shop",
                help="shop: five steps with their code; kill: sends, kills, counts (shop)",
            ),
            option("--seed", metavar="N", help="kill: draws when the producer is killed (drawn, and shown)"),
            option("--keep", metavar="FOLDER", help="work in this folder and leave it; the next run replaces it"),
        ),
        description="Shows what librmq is for, in a temporary folder, within half a minute. Each line of code runs as "
        "it is shown. `kill` sends 10,000 messages while their producer is killed with -9, and counts them. The exit "
        "status is 1 if one is lost.",
        store=False, output=(),
    ),
    Command(
        "doctor", "diagnosis", "report what is installed: Python, core, Spark, Java", "",
        (
            option("store", metavar="STORE", nargs="?", help="also list what jobs of Spark have staged in this store"),
            option("--start", action="store_true", help="also start a session"),
            _MASTER,
        ),
        store=False, output=OUTPUT,
    ),
    Command(
        "filter", "filters", "explain a filter expression", "--explain 'price > 5' price=7",
        (
            option("--dialect", choices=("4.9", "5.3"), default="4.9", help="the grammar (4.9)"),
            option("--strict", action="store_true", help="refuse text after a whole expression, which brokers ignore"),
            option(
                "--explain", nargs="?", const=True, required=True, metavar="EXPR",
                help="explain this expression; without one, each case {expr, props} on standard input",
            ),
            option("properties", nargs="*", type=pair, metavar="NAME=TEXT", help="the properties of a message"),
        ),
        description="Says which term of an expression decides about a message with the given properties, and why.",
        store=False, output=(),
    ),
    Command(
        "completion", "completion", "print a script that completes commands in a shell", "bash",
        (option("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),),
        store=False, output=(),
    ),
)  # fmt: skip

SECTIONS: Final[dict[str, tuple[Command, ...]]] = {"Look": _LOOK, "Change": _CHANGE, "Files": _FILES, "Tools": _TOOLS}
"""The commands by the headings of the help."""
COMMANDS: Final[dict[str, Command]] = {command.name: command for section in SECTIONS.values() for command in section}
READING: Final = frozenset((*(command.name for command in _LOOK), "dump", "export", "queue", "timers")) - {"disk"}
"""Commands that read the messages of a store, or what is known about them."""
_NO_PROGRESS: Final = "the progress that groups had then is not kept"
UNDATED: Final = {
    "disk": "it shows the files and the disk as they are",
    "expiring": _NO_PROGRESS,
    "progress": _NO_PROGRESS,
    "schedules": "only what is due next is kept",
    "top": "it shows what runs now",
    "timers": "the timer's files hold only what waits now; librmq pending --at lists the messages that waited then",
    "verify": "it compares the files as they are",
    "whatif": f"{_NO_PROGRESS}; librmq lag --at gives the ends of the queues then",
}
"""Commands that show a store only as it is now, with the reason."""
PAST: Final = (READING | {"extract"}) - UNDATED.keys()
"""Commands that can show a store as it was."""
