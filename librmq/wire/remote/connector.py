"""Connecting to a cluster of RocketMQ 4.x, or to ``librmq serve --remoting``, over TCP."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta

from librmq.clock import moves_by_itself
from librmq.config import to_seconds
from librmq.errors import BrokerUnreachableError, ConfigError
from librmq.runtime.runner import Runner
from librmq.runtime.threads import ThreadRunner
from librmq.wire.remote.connection import AccessKeys, HostNames, dial_by_tcp, split_address
from librmq.wire.remote.name_servers import addresses_of
from librmq.wire.remote.remote_route import Notices, RemoteRoute


def connect(
    address: str,
    *,
    timeout: float | timedelta = 3,
    tls: ssl.SSLContext | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    security_token: str | None = None,
    runner: Runner | None = None,
) -> RemoteRoute:
    """Return a route to a cluster, which producers and consumers take like a `Broker`; close it after them.

    Args:
        address: ``host:port`` of a name server, or of several with ``;`` between them.
        timeout: Time for each answer, in seconds or as a `timedelta`.
        tls: Context of a client, such as `ssl.create_default_context()`; None for plain text.
        access_key: Name of the key that signs requests; None where the brokers ask for none.
        secret_key: Its secret.
        security_token: A temporary token that belongs to the key.
        runner: Runs listeners and steps; None makes one, which is closed with the route.

    Raises:
        BrokerUnreachableError: No name server answers.
        BrokerError: The server at the address is no name server.
        ConfigError: An argument is invalid.
    """
    if not isinstance(address, str):
        raise ConfigError(f"address: expected host:port of a name server, found {address!r:.80}")
    addresses = addresses_of(address)
    timeout_s = to_seconds("timeout", timeout)
    if timeout_s <= 0:
        raise ConfigError(f"timeout: expected more than 0 seconds, found {timeout_s:g}")
    if tls is not None and not isinstance(tls, ssl.SSLContext):
        raise ConfigError(f"tls: expected an ssl.SSLContext, found {tls!r:.80}: use ssl.create_default_context()")
    keys = None
    if access_key is not None or secret_key is not None or security_token is not None:
        keys = AccessKeys(access_key or "", secret_key or "", security_token)
    if runner is not None and not moves_by_itself(runner.clock):
        raise ConfigError("runner: expected one whose time passes by itself, such as a ThreadRunner")
    with ExitStack() as stack:
        if runner is None:
            runner = own_runner = ThreadRunner()
            stack.callback(own_runner.shutdown)
        notices = Notices(runner)
        stack.callback(notices.close)
        names = HostNames(timeout_s, runner.clock)
        dial = dial_by_tcp(tls, keys, timeout_s, names.find)
        opened = ExitStack()
        route = RemoteRoute(
            addresses,
            runner,
            dial,
            timeout_s=timeout_s,
            later=notices.later,
            prepare=names.prepare,
            at_close=opened,
        )
        route.own_host = _own_host(addresses, names)
        opened.push(stack.pop_all())
    return route


def _own_host(addresses: Sequence[str], names: HostNames) -> str | None:
    """Return this machine's address towards the name servers; None if it has none."""
    for address in addresses:
        host, port = split_address(address)
        with suppress(OSError, BrokerUnreachableError):
            number = names.find(host)[0]
            family = socket.AF_INET6 if ":" in number else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((number, int(port)))  # sends nothing
                return str(asking.getsockname()[0]).partition("%")[0]
    return None
