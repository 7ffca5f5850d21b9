"""The protocol of clients and brokers: requests and responses as values, all of which are imported from here.

Clients hold a `Route` to `Endpoint`s; a broker is an endpoint, and a route with one endpoint. An endpoint takes a
message by `send`, which makes a request unless the broker is in the process, and all else by `call`. Faults, latency, a
wire or a recorder are endpoints on a route of their own, and get requests. A client is a `RequestHandler` too, which
its brokers call (`Heartbeat.client`). A refused request raises `BrokerError`. Mirrors the request headers of
``org.apache.rocketmq.common.protocol``; the codes mirror ``ResponseCode``.
"""

from __future__ import annotations

from librmq.protocol._administration import *  # noqa: F403 (its `__all__` names them)
from librmq.protocol._client_requests import DAMAGE_MS as DAMAGE_MS
from librmq.protocol._client_requests import ENDED as ENDED
from librmq.protocol._client_requests import INNER_PRODUCER as INNER_PRODUCER
from librmq.protocol._client_requests import MAX_INVISIBLE_MS as MAX_INVISIBLE_MS
from librmq.protocol._client_requests import MAX_RECEIVED as MAX_RECEIVED
from librmq.protocol._client_requests import NOT_SENT_HERE as NOT_SENT_HERE
from librmq.protocol._client_requests import OF_GROUP as OF_GROUP
from librmq.protocol._client_requests import REPLAY_PRODUCER as REPLAY_PRODUCER
from librmq.protocol._client_requests import TOOL_PRODUCERS as TOOL_PRODUCERS
from librmq.protocol._client_requests import Acknowledge as Acknowledge
from librmq.protocol._client_requests import CancelMessage as CancelMessage
from librmq.protocol._client_requests import CancelReceive as CancelReceive
from librmq.protocol._client_requests import CancelResult as CancelResult
from librmq.protocol._client_requests import ChangeInvisible as ChangeInvisible
from librmq.protocol._client_requests import ChannelClosed as ChannelClosed
from librmq.protocol._client_requests import CheckSubscription as CheckSubscription
from librmq.protocol._client_requests import CheckTransaction as CheckTransaction
from librmq.protocol._client_requests import ClientRemoved as ClientRemoved
from librmq.protocol._client_requests import ConsumeFrom as ConsumeFrom
from librmq.protocol._client_requests import ConsumerData as ConsumerData
from librmq.protocol._client_requests import ConsumerIds as ConsumerIds
from librmq.protocol._client_requests import ConsumersChanged as ConsumersChanged
from librmq.protocol._client_requests import EndTransaction as EndTransaction
from librmq.protocol._client_requests import ForwardToDeadLetters as ForwardToDeadLetters
from librmq.protocol._client_requests import GroupSubscriptions as GroupSubscriptions
from librmq.protocol._client_requests import Heartbeat as Heartbeat
from librmq.protocol._client_requests import HoldPlace as HoldPlace
from librmq.protocol._client_requests import LockQueues as LockQueues
from librmq.protocol._client_requests import MaxOffset as MaxOffset
from librmq.protocol._client_requests import MessageModel as MessageModel
from librmq.protocol._client_requests import MinOffset as MinOffset
from librmq.protocol._client_requests import PendingSend as PendingSend
from librmq.protocol._client_requests import PullMessage as PullMessage
from librmq.protocol._client_requests import PullResponse as PullResponse
from librmq.protocol._client_requests import PullStatus as PullStatus
from librmq.protocol._client_requests import QueryOffset as QueryOffset
from librmq.protocol._client_requests import QueueOffsetAt as QueueOffsetAt
from librmq.protocol._client_requests import Receive as Receive
from librmq.protocol._client_requests import Received as Received
from librmq.protocol._client_requests import ReceiveResponse as ReceiveResponse
from librmq.protocol._client_requests import ReplyArrived as ReplyArrived
from librmq.protocol._client_requests import SendBack as SendBack
from librmq.protocol._client_requests import SendBatch as SendBatch
from librmq.protocol._client_requests import SendLater as SendLater
from librmq.protocol._client_requests import SendMessage as SendMessage
from librmq.protocol._client_requests import SendReply as SendReply
from librmq.protocol._client_requests import SendResponse as SendResponse
from librmq.protocol._client_requests import SendStatus as SendStatus
from librmq.protocol._client_requests import SendTogether as SendTogether
from librmq.protocol._client_requests import SentBack as SentBack
from librmq.protocol._client_requests import SentMessage as SentMessage
from librmq.protocol._client_requests import StartGroup as StartGroup
from librmq.protocol._client_requests import StartOutcome as StartOutcome
from librmq.protocol._client_requests import Subscription as Subscription
from librmq.protocol._client_requests import TakeHandOuts as TakeHandOuts
from librmq.protocol._client_requests import Takes as Takes
from librmq.protocol._client_requests import TopicGroups as TopicGroups
from librmq.protocol._client_requests import TransactionState as TransactionState
from librmq.protocol._client_requests import UnlockQueues as UnlockQueues
from librmq.protocol._client_requests import Unregister as Unregister
from librmq.protocol._client_requests import UpdateOffset as UpdateOffset
from librmq.protocol._client_requests import cancel_request as cancel_request
from librmq.protocol._client_requests import ended_cause as ended_cause
from librmq.protocol._client_requests import process_deaths as process_deaths
from librmq.protocol._endpoint import LOCAL_HOST as LOCAL_HOST
from librmq.protocol._endpoint import PERM_INHERIT as PERM_INHERIT
from librmq.protocol._endpoint import PERM_READ as PERM_READ
from librmq.protocol._endpoint import PERM_WRITE as PERM_WRITE
from librmq.protocol._endpoint import Endpoint as Endpoint
from librmq.protocol._endpoint import QueueData as QueueData
from librmq.protocol._endpoint import ResponseCode as ResponseCode
from librmq.protocol._endpoint import Route as Route
from librmq.protocol._endpoint import RouteWrapper as RouteWrapper
from librmq.protocol._endpoint import SendsLater as SendsLater
from librmq.protocol._endpoint import Watchers as Watchers
from librmq.protocol._endpoint import check_site as check_site
from librmq.protocol._endpoint import site_of as site_of
from librmq.protocol._endpoint import watch_all as watch_all
from librmq.protocol._request import ReadRequest as ReadRequest
from librmq.protocol._request import Request as Request
from librmq.protocol._request import RequestHandler as RequestHandler
from librmq.protocol._request import value as value
from librmq.store.format.group_page import BEGUN as BEGUN
from librmq.store.format.group_page import SLOT_PRIME as SLOT_PRIME
from librmq.store.format.group_page import SLOTS as SLOTS
from librmq.store.format.group_page import GroupPage as GroupPage
from librmq.store.format.group_page import Place as Place
from librmq.store.format.group_page import PlaceName as PlaceName
from librmq.store.format.group_page import Suspect as Suspect

__all__ = ["Endpoint", "LockQueues", "Request", "ResponseCode", "Route", "RouteWrapper", "UnlockQueues"]
