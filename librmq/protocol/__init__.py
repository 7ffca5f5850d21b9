"""The protocol of clients and brokers: requests and responses as values.

Clients hold a `Route` to `Endpoint`s; a broker is an endpoint, and a route with one endpoint. A client is an `Endpoint`
too, which its brokers call (`Heartbeat.client`). Faults, latency, a wire or a recorder wrap `Endpoint.call`. A refused
request raises `BrokerError`. Mirrors the request headers of ``org.apache.rocketmq.common.protocol``; the codes mirror
``ResponseCode``.
"""

from __future__ import annotations

from librmq.protocol._administration import MEMBERSHIP as MEMBERSHIP
from librmq.protocol._administration import REPLICA_READS as REPLICA_READS
from librmq.protocol._administration import CleanUnusedTopics as CleanUnusedTopics
from librmq.protocol._administration import ConnectedClient as ConnectedClient
from librmq.protocol._administration import ConsumeDirectly as ConsumeDirectly
from librmq.protocol._administration import ConsumerOffsets as ConsumerOffsets
from librmq.protocol._administration import ConsumerOffsetsOf as ConsumerOffsetsOf
from librmq.protocol._administration import CopiedTables as CopiedTables
from librmq.protocol._administration import CopyTables as CopyTables
from librmq.protocol._administration import CreateTopic as CreateTopic
from librmq.protocol._administration import DeleteExpiredFiles as DeleteExpiredFiles
from librmq.protocol._administration import DeleteGroup as DeleteGroup
from librmq.protocol._administration import DeleteTopic as DeleteTopic
from librmq.protocol._administration import DescribeClients as DescribeClients
from librmq.protocol._administration import DescribeConnections as DescribeConnections
from librmq.protocol._administration import DescribeGroups as DescribeGroups
from librmq.protocol._administration import DescribeInstance as DescribeInstance
from librmq.protocol._administration import DescribeLog as DescribeLog
from librmq.protocol._administration import DescribeProgress as DescribeProgress
from librmq.protocol._administration import DescribeQueues as DescribeQueues
from librmq.protocol._administration import DescribeTopics as DescribeTopics
from librmq.protocol._administration import DirectlyConsumed as DirectlyConsumed
from librmq.protocol._administration import DirectResult as DirectResult
from librmq.protocol._administration import FollowLog as FollowLog
from librmq.protocol._administration import GroupConnections as GroupConnections
from librmq.protocol._administration import GroupProgress as GroupProgress
from librmq.protocol._administration import GroupsBehind as GroupsBehind
from librmq.protocol._administration import GroupSettings as GroupSettings
from librmq.protocol._administration import HeldQueue as HeldQueue
from librmq.protocol._administration import InstanceState as InstanceState
from librmq.protocol._administration import LeaveLog as LeaveLog
from librmq.protocol._administration import ListenerCall as ListenerCall
from librmq.protocol._administration import LogBytes as LogBytes
from librmq.protocol._administration import LogDescription as LogDescription
from librmq.protocol._administration import MoveGroup as MoveGroup
from librmq.protocol._administration import QueryMessages as QueryMessages
from librmq.protocol._administration import QueueBounds as QueueBounds
from librmq.protocol._administration import ResendLetters as ResendLetters
from librmq.protocol._administration import ResentLetters as ResentLetters
from librmq.protocol._administration import ResetGroup as ResetGroup
from librmq.protocol._administration import ResetOffsets as ResetOffsets
from librmq.protocol._administration import SaveProgress as SaveProgress
from librmq.protocol._administration import SetGroup as SetGroup
from librmq.protocol._administration import TopicDescription as TopicDescription
from librmq.protocol._administration import ViewMessage as ViewMessage
from librmq.protocol.client_requests import MAX_INVISIBLE_MS as MAX_INVISIBLE_MS
from librmq.protocol.client_requests import MAX_RECEIVED as MAX_RECEIVED
from librmq.protocol.client_requests import Acknowledge as Acknowledge
from librmq.protocol.client_requests import CancelMessage as CancelMessage
from librmq.protocol.client_requests import CancelReceive as CancelReceive
from librmq.protocol.client_requests import CancelResult as CancelResult
from librmq.protocol.client_requests import ChangeInvisible as ChangeInvisible
from librmq.protocol.client_requests import ChannelClosed as ChannelClosed
from librmq.protocol.client_requests import CheckSubscription as CheckSubscription
from librmq.protocol.client_requests import CheckTransaction as CheckTransaction
from librmq.protocol.client_requests import ClientRemoved as ClientRemoved
from librmq.protocol.client_requests import ConsumeFrom as ConsumeFrom
from librmq.protocol.client_requests import ConsumerData as ConsumerData
from librmq.protocol.client_requests import ConsumerIds as ConsumerIds
from librmq.protocol.client_requests import ConsumersChanged as ConsumersChanged
from librmq.protocol.client_requests import EndTransaction as EndTransaction
from librmq.protocol.client_requests import ForwardToDeadLetters as ForwardToDeadLetters
from librmq.protocol.client_requests import GroupSubscriptions as GroupSubscriptions
from librmq.protocol.client_requests import Heartbeat as Heartbeat
from librmq.protocol.client_requests import LockQueues as LockQueues
from librmq.protocol.client_requests import MaxOffset as MaxOffset
from librmq.protocol.client_requests import MessageModel as MessageModel
from librmq.protocol.client_requests import MinOffset as MinOffset
from librmq.protocol.client_requests import PullMessage as PullMessage
from librmq.protocol.client_requests import PullResponse as PullResponse
from librmq.protocol.client_requests import PullStatus as PullStatus
from librmq.protocol.client_requests import QueryOffset as QueryOffset
from librmq.protocol.client_requests import QueueOffsetAt as QueueOffsetAt
from librmq.protocol.client_requests import Receive as Receive
from librmq.protocol.client_requests import Received as Received
from librmq.protocol.client_requests import ReceiveResponse as ReceiveResponse
from librmq.protocol.client_requests import ReplyArrived as ReplyArrived
from librmq.protocol.client_requests import SendBack as SendBack
from librmq.protocol.client_requests import SendBatch as SendBatch
from librmq.protocol.client_requests import SendLater as SendLater
from librmq.protocol.client_requests import SendMessage as SendMessage
from librmq.protocol.client_requests import SendReply as SendReply
from librmq.protocol.client_requests import SendResponse as SendResponse
from librmq.protocol.client_requests import SendStatus as SendStatus
from librmq.protocol.client_requests import SendTogether as SendTogether
from librmq.protocol.client_requests import SentBack as SentBack
from librmq.protocol.client_requests import StartGroup as StartGroup
from librmq.protocol.client_requests import StartOutcome as StartOutcome
from librmq.protocol.client_requests import Subscription as Subscription
from librmq.protocol.client_requests import TopicGroups as TopicGroups
from librmq.protocol.client_requests import TransactionState as TransactionState
from librmq.protocol.client_requests import UnlockQueues as UnlockQueues
from librmq.protocol.client_requests import Unregister as Unregister
from librmq.protocol.client_requests import UpdateOffset as UpdateOffset
from librmq.protocol.endpoint import LOCAL_HOST as LOCAL_HOST
from librmq.protocol.endpoint import PERM_INHERIT as PERM_INHERIT
from librmq.protocol.endpoint import PERM_READ as PERM_READ
from librmq.protocol.endpoint import PERM_WRITE as PERM_WRITE
from librmq.protocol.endpoint import Endpoint as Endpoint
from librmq.protocol.endpoint import QueueData as QueueData
from librmq.protocol.endpoint import Request as Request
from librmq.protocol.endpoint import ResponseCode as ResponseCode
from librmq.protocol.endpoint import Route as Route

__all__ = ["Endpoint", "LockQueues", "Request", "ResponseCode", "Route", "UnlockQueues"]
