"""The routes of commands: to the brokers of a cluster by ``--route``, and to the process that shares a store.

::

    commands that read     the files, which have the owner's messages, and its tables as they are now
    commands that change   requests to the owner, which tells the clients of all processes
    with --dry-run         the same without the requests; notes are kept in memory
"""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

from librmq.broker import AdministeredRoute
from librmq.errors import InputError
from librmq.files import DiskFiles, OverlayFiles
from librmq.override import override
from librmq.protocol import (
    CancelMessage,
    CreateTopic,
    DescribeTopics,
    Endpoint,
    MoveGroup,
    PullMessage,
    QueueData,
    ReadRequest,
    Request,
    ResendLetters,
    RouteWrapper,
)
from librmq.store.format.broker_tables import topic_type
from librmq.wire.remote import RemoteRoute, connect
from librmq.wire.share_links import OwnedStore, connect_to_sharing

_VARIABLES: Final = {
    "accessKey": "LIBRMQ_ACCESS_KEY",
    "secretKey": "LIBRMQ_SECRET_KEY",
    "securityToken": "LIBRMQ_SECURITY_TOKEN",
}
_KEY_LINE: Final = re.compile(
    r"^[ \t]*(accessKey|secretKey|securityToken)[ \t]*:[ \t]*([\"']?)(.+?)\2[ \t]*(?:[ \t]#.*)?$", re.M
)


def connect_to(arguments: argparse.Namespace) -> RemoteRoute:
    """Connect to the name server in ``--route``, with the keys and the TLS that options, environment or a file name.

    Raises:
        BrokerUnreachableError: No name server answers there.
        InputError: A file can't be read, or has no key.
    """
    keys, tls = _keys(arguments), None
    ca_file = arguments.tls_ca or os.environ.get("LIBRMQ_TLS_CA")
    if arguments.tls or ca_file:
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # an SSLError is one
            raise InputError(f"--tls-ca {ca_file}: {error.strerror or error}: expected certificates in PEM") from None
    return connect(
        arguments.route,
        access_key=keys.get("accessKey"),
        secret_key=keys.get("secretKey"),
        security_token=keys.get("securityToken"),
        tls=tls,
    )


def _keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the keys by their names in ``tools.yml``: of a file, or of options and environment."""
    variables = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
    variables["accessKey"] = arguments.access_key or variables["accessKey"]
    variables["secretKey"] = arguments.secret_key or variables["secretKey"]
    if (keys := {name: value for name, value in variables.items() if value}) and arguments.keys is None:
        if "accessKey" not in keys or "secretKey" not in keys:
            raise InputError(
                f"found only {', '.join(keys)}: expected a name and a secret, by --access-key and --secret-key, by "
                "LIBRMQ_ACCESS_KEY and LIBRMQ_SECRET_KEY, or by --keys FILE"
            )
        return keys
    home = os.environ.get("ROCKETMQ_HOME")
    default_path = os.path.join(home, "conf", "tools.yml") if home else None
    path = arguments.keys or (default_path if default_path is not None and os.path.exists(default_path) else None)
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    keys = {match[1]: match[3] for match in _KEY_LINE.finditer(text)}
    if "accessKey" in keys and "secretKey" in keys:
        return keys
    if arguments.keys is None:
        return {}
    raise InputError(f"{path}: expected lines such as 'accessKey: name' and 'secretKey: secret'")


# ---- running brokers


class DryRun(Endpoint):
    """A running broker that gets no request that changes it."""

    def __init__(self, name: str, broker: Endpoint) -> None:
        self._name = name
        self._broker = broker
        self._created: dict[str, QueueData] = {}

    @override
    def call(self, request: Request[Any], /) -> Any:  # noqa: ANN401
        """Answer a request that reads; to one that changes, the answer is empty."""
        if isinstance(request, CancelMessage | MoveGroup | ResendLetters):
            tried: Request[Any] = replace(request, dry_run=True)
            return self._broker.call(tried)
        if isinstance(request, CreateTopic):
            queues, kind = (request.read_queues, request.write_queues), topic_type({"attributes": request.attributes})
            self._created[request.topic] = QueueData(self._name, *queues, request.permission, kind)
        if not isinstance(request, ReadRequest | PullMessage):
            return {}
        answer: Any = self._broker.call(request)
        return {**answer, **self._created} if isinstance(request, DescribeTopics) else answer


class ActingRoute(RouteWrapper, AdministeredRoute):
    """The route by which a command acts at running brokers; with ``dry_run`` it changes nothing there."""

    def __init__(self, remote: AdministeredRoute, *, dry_run: bool) -> None:
        super().__init__(remote)
        self._dry_runs = {name: DryRun(name, remote.endpoint(name)) for name in remote.broker_names() if dry_run}

    @override
    def endpoint(self, broker_name: str) -> Endpoint:
        """Return a broker; `NoRouteError` for an unknown name."""
        return self._dry_runs.get(broker_name) or super().endpoint(broker_name)


@contextmanager
def owner_of(path: str, *, dry_run: bool = False) -> Iterator[OwnedStore | None]:
    """Connect like `connect_to_sharing`, for a command that acts; with ``dry_run`` nothing is changed there."""
    with connect_to_sharing(path) as route, ExitStack() as opened:
        if route is None:
            yield None
        else:
            acting, files = ActingRoute(route, dry_run=dry_run), OverlayFiles() if dry_run else DiskFiles()
            yield OwnedStore(path, route, opened, acting=acting, files=files)
