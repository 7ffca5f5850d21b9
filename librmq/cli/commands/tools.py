"""Commands for other programs, and commands that need no store."""

from __future__ import annotations

import argparse
from typing import Final

from librmq.cli.options import AS_RECOVERED, GROUP, OUTPUT, STORAGE_OPTIONS, TAG, TIMES, TOPIC, Command, option

_STORES: Final = option("stores", metavar="STORE", nargs="+", help="the folders of the stores, or their URLs")
_MASTER: Final = option("--master", metavar="URL", default="local[*]", help="Spark's master (local[*])")
_RANGES: Final = (TOPIC, GROUP, TAG, *TIMES)

COMMANDS: Final = (
    Command(
        "report",
        "diagnosis",
        "write a page about stores: what to look at, lag, rates",
        "store --out report.html",
        (
            _STORES,
            option("-o", "--out", metavar="FILE", default="report.html", help="the page (report.html); JSON is beside"),
            option("--compare", metavar="JSON", help="the JSON of an earlier report: also show changes and rates"),
            option(
                "--verify",
                action=argparse.BooleanOptionalAction,
                help="check every record of large stores too (default: up to 300,000 messages)",
            ),
            AS_RECOVERED,
            option("--spark", action="store_true", help="read the stores with Spark, which can be a cluster"),
            *_RANGES,
            STORAGE_OPTIONS,
            _MASTER,
        ),
        description="Writes one page that opens offline, and the same as JSON beside it (extras: report, arrow).",
        store=False,
    ),
    Command(
        "spark",
        "spark",
        "run a pipeline over stores with Spark",
        "list",
        (
            option("action", metavar="ACTION", choices=("list", "run"), help="list the pipelines, or run one"),
            option("name", metavar="NAME", nargs="?", help="run: the pipeline"),
            option("stores", metavar="STORE", nargs="*", help="run: the folders of the stores"),
            option("-o", "--out", metavar="FOLDER", help="write the rows there as Parquet, not to the output"),
            option("--overwrite", action="store_true", help="replace an existing folder"),
            option("--append", action="store_true", help="keep each run, as a partition run=TIME of the folder"),
            option("--incremental", action="store_true", help="read only what is new since the last such run"),
            option("--partition-by", metavar="COLUMNS", help="make folders by the values of columns"),
            option("--set", action="append", metavar="NAME=VALUE", help="a setting of the pipeline"),
            *_RANGES,
            _MASTER,
        ),
        description="Runs a pipeline over one store or a cluster's; `librmq spark list` lists them (extra: spark).",
        store=False,
        output=OUTPUT[:1],
    ),
    Command(
        "serve",
        "serve",
        "serve a store to official clients of RocketMQ",
        "store --grpc 8081 --remoting 9876",
        (
            option("--grpc", type=int, metavar="PORT", help="port for clients of RocketMQ 5; 0 takes a free one"),
            option(
                "--grpc-tls", type=int, metavar="PORT", help="a second port for them, with TLS; the first stays plain"
            ),
            option("--remoting", type=int, metavar="PORT", help="port for clients of 4.x; 0 takes a free one"),
            option("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine only)"),
            option("--advertise", metavar="HOST[:PORT]", help="the address in routes (what the client dialled)"),
            option("--admin", action="store_true", help="let other machines change topics and groups"),
            option(
                "--tls",
                nargs="*",
                metavar="PEM",
                help="serve TLS: with the files of a certificate and its key, or without with a self-signed pair",
            ),
            option(
                "--no-auto-create",
                action="store_true",
                help="do not create a topic when a client of RocketMQ 5 asks for its route",
            ),
            option(
                "--clock",
                choices=("system", "manual"),
                default="system",
                help="manual: time moves only by requests to the control port, for tests in any language",
            ),
            option(
                "--control", type=int, metavar="PORT", help="control port of --clock manual; 0 takes a free one (0)"
            ),
        ),
        description="Serves the store until interrupted, and creates it if it does not exist. Without a port: gRPC "
        "on 8081 if the extra grpc is installed, and remoting (4.x) on 9876. Prints a line when ready, then one for "
        "each client that connects or leaves.",
        makes_store=True,
        output=OUTPUT[:1],
    ),
    Command(
        "doctor",
        "spark",
        "report what is missing to run Spark here",
        "",
        (option("--start", action="store_true", help="also start a session"), _MASTER),
        store=False,
        output=OUTPUT,
    ),
    Command(
        "ask",
        "messages",
        "answer queries from standard input",
        "store < questions.jsonl",
        description="Answers queries, one JSON object a line: index_query, get_message, offset_by_time.",
        output=OUTPUT,
    ),
    Command(
        "filter",
        "cases",
        "evaluate filter expressions, or explain one",
        "--explain 'price > 5' price=7",
        (
            option("--dialect", choices=("4.9", "5.3"), default="4.9", help="the grammar (4.9)"),
            option("--strict", action="store_true", help="refuse text after a whole expression, which brokers ignore"),
            option(
                "--explain",
                nargs="?",
                const=True,
                metavar="EXPR",
                help="explain this expression; without one, each case on standard input",
            ),
            option("properties", nargs="*", metavar="NAME=TEXT", help="with --explain EXPR: the message's properties"),
        ),
        description="Evaluates the cases {expr, props} on standard input, one JSON object a line. With --explain it "
        "says which term of an expression decides about a message with the given properties, and why.",
        store=False,
        output=OUTPUT,
    ),
    Command(
        "allocate",
        "cases",
        "allocate queues, or select one",
        "< cases.jsonl",
        store=False,
        output=OUTPUT,
    ),
    Command(
        "bloom",
        "cases",
        "print the bit positions of strings in a bitmap",
        "< strings.jsonl",
        store=False,
        output=OUTPUT,
    ),
    Command(
        "completion",
        "arguments",
        "print a script that completes commands in a shell",
        "bash",
        (option("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish"),),
        store=False,
    ),
)
