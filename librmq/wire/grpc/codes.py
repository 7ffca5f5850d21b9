"""Status codes of the service, and what they say of a broker's refusal."""

from __future__ import annotations

import enum
from typing import Final

from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    FilterSyntaxError,
    MessageIllegalError,
    NoRouteError,
    ReceiptError,
    RmqError,
)
from librmq.protocol import ResponseCode, SendStatus


class Code(enum.IntEnum):
    """A status code, as the service numbers them."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402


SEND_CODES: Final = {
    SendStatus.SEND_OK: Code.OK,
    SendStatus.FLUSH_DISK_TIMEOUT: Code.MASTER_PERSISTENCE_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: Code.SLAVE_PERSISTENCE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: Code.HA_NOT_AVAILABLE,
}
_BY_RESPONSE: Final = {
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
}


class Refusal(RmqError):
    """A request that the service refuses, with the code for its client."""

    def __init__(self, code: Code, remark: str) -> None:
        super().__init__(remark)
        self.code = code


def code_of(error: RmqError) -> Code:
    """Return the code for an error of librmq."""
    if isinstance(error, Refusal):
        return error.code
    if isinstance(error, ReceiptError):
        return Code.INVALID_RECEIPT_HANDLE
    if isinstance(error, BrokerBusyError):
        return Code.TOO_MANY_REQUESTS
    if isinstance(error, FilterSyntaxError):
        return Code.ILLEGAL_FILTER_EXPRESSION
    if isinstance(error, NoRouteError):
        return Code.TOPIC_NOT_FOUND
    if isinstance(error, MessageIllegalError):
        return Code.BAD_REQUEST
    if isinstance(error, BrokerError):
        return _BY_RESPONSE.get(ResponseCode(error.code), Code.INTERNAL_SERVER_ERROR)
    return Code.INTERNAL_SERVER_ERROR
