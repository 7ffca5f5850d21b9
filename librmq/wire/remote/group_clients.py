"""What a broker says of the clients of a group, read from the body of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from librmq.errors import MalformedError
from librmq.protocol import ConsumeFrom, ConsumerData, MessageModel
from librmq.wire.remoting.bodies import read_body, subscription_of


def consumer_data(group: str, body: Mapping[str, Any]) -> tuple[ConsumerData, tuple[str, ...]]:
    """Return a group as its clients describe it, and the ids of the clients.

    Raises:
        MalformedError: This is no list of connections.
    """
    rows = body.get("connectionSet") or []
    ids = [row.get("clientId") if isinstance(row, dict) else None for row in rows] if isinstance(rows, list) else [None]
    if not all(isinstance(client_id, str) for client_id in ids):
        raise MalformedError(f"connectionSet: expected objects with a clientId, found {rows!r:.80}")
    table = body.get("subscriptionTable") or {}
    if not isinstance(table, dict):
        raise MalformedError(f"subscriptionTable: expected an object, found {table!r:.80}")
    begin, model = body.get("consumeFromWhere"), body.get("messageModel")
    data = ConsumerData(
        group,
        "pull" if body.get("consumeType") == "CONSUME_ACTIVELY" else "push",
        MessageModel.BROADCASTING if model == MessageModel.BROADCASTING.value else MessageModel.CLUSTERING,
        next((start for start in ConsumeFrom if start.value == begin), ConsumeFrom.LAST),
        {str(topic): subscription_of(row) for topic, row in table.items()},
    )
    return data, tuple(map(str, ids))


def group_names(body: bytes) -> list[str]:
    """Return the groups of a topic from the body of an answer.

    Raises:
        MalformedError: This is no list of groups.
    """
    names = read_body(body, "the groups of a topic").get("groupList") or []
    if not isinstance(names, list):
        raise MalformedError(f"groupList: expected a list, found {names!r:.80}")
    return [str(name) for name in names]
