"""Requests, the codes of their refusals, and the decorator that makes values of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar, dataclass_transform

R = TypeVar("R")
_C = TypeVar("_C")


@dataclass_transform(frozen_default=True)
def value(cls: type[_C]) -> type[_C]:
    """Make a value of a class: a dataclass with slots."""
    # Only the type checker prevents changes, because a frozen dataclass takes 2 µs longer to make.
    return dataclass(slots=True, weakref_slot=False)(cls)


class ResponseCode(enum.IntEnum):
    """Reason of a broker's refusal."""

    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    NO_BUYER_ID = 204
    NOT_IN_CURRENT_UNIT = 205
    CONSUMER_NOT_ONLINE = 206


class Request(Generic[R]):
    """A request whose answer is an ``R``."""

    __slots__ = ()
