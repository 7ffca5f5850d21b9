"""Clients under the old rule of default instance names: one client per process, whatever its routes are.

Before 4.9.1 the default instance name was the process id, so all producers and consumers that named no instance
shared one ``MQClientInstance``, which used the brokers of the first. Mirrors ``MQClientManager`` of that time.
"""

from __future__ import annotations

import os

from librmq.client.identity import Client
from librmq.protocol import Route
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.client")


class ProcessClients:
    """The clients of one process under the old rule, to reproduce its mix-ups. New code gives each client its own id.

    A producer for cluster B gets the client of a consumer of cluster A, and its sends go to cluster A:

        clients = ProcessClients()
        consumer = PushConsumer(a, "billing", client=clients.client_for(a))
        client = clients.client_for(b)  # logs a warning, and is the client of a
        Producer(client.route, "shop", client=client).send("only-in-b", b"x")  # NoRouteError, or stored in a
    """

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    def client_for(self, route: Route, *, instance_name: str | None = None) -> Client:
        """Return the client with that name, by default the process id. The first call binds it to its ``route``."""
        name = str(os.getpid()) if instance_name is None else instance_name
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(route, instance_name=name)
        elif client.route is not route:
            _log.warning(
                "client %(client)s belongs to %(route)s already, and not to %(other_route)s: what uses it reaches the "
                "first one's brokers. Give each route an instance_name of its own",
                client=client.client_id,
                route=client.route,
                other_route=route,
            )
        return client
