"""The protocol of clients and brokers: requests and responses as values, all of which are imported from here.

Clients hold a `Route` to `Endpoint`s; a broker is an endpoint, and a route with one endpoint. An endpoint takes a
message by `send`, which makes a request unless the broker is in the process, and all else by `call`. Faults, latency, a
wire or a recorder are endpoints on a route of their own, and get requests. A client is a `RequestHandler` too, which
its brokers call (`Heartbeat.client`). A refused request raises `BrokerError`. Mirrors the request headers of
``org.apache.rocketmq.common.protocol``; the codes mirror ``ResponseCode``.
"""

from __future__ import annotations

# Each has in its `__all__` what this package exports of it.
from librmq.protocol._administration import *  # noqa: F403
from librmq.protocol._client_requests import *  # noqa: F403
from librmq.protocol._endpoint import *  # noqa: F403
from librmq.protocol._request import *  # noqa: F403
from librmq.store.format.group_page import BEGUN as BEGUN
from librmq.store.format.group_page import SLOT_PRIME as SLOT_PRIME
from librmq.store.format.group_page import SLOTS as SLOTS
from librmq.store.format.group_page import GroupPage as GroupPage
from librmq.store.format.group_page import Place as Place
from librmq.store.format.group_page import PlaceName as PlaceName
from librmq.store.format.group_page import Suspect as Suspect

__all__ = ["Endpoint", "LockQueues", "Request", "ResponseCode", "Route", "RouteWrapper", "UnlockQueues"]  # noqa: F405
