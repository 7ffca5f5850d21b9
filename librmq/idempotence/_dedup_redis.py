"""Records of a dedup guard in Redis: extra ``redis``.

::

    MSGDEDUP:application:topic:group:tag:key  →  state:expires_timestamp_ms:owner        state 0 consuming, 1 consumed

Each call is one script, and so one round trip. The time in a record decides, by the clocks of the clients that share
the server. The server's own expiry, a minute later, only removes old records. A widespread layout,
``MSGDEDUP:application:topic[:tag]:key``, lacks the group: with it, two groups of one application lose messages to each
other.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from librmq.clock import Clock
from librmq.errors import ConfigError, DedupStoreError, MissingExtraError
from librmq.idempotence.stores import CLAIMS, Claim, DedupRecord

if TYPE_CHECKING:  # for types alone, because importing it needs the extra ``redis``
    from redis import Redis

T = TypeVar("T")

_MARGIN_MS: Final = 60_000

_READ: Final = """
local held = redis.call('GET', KEYS[1])
local state, expires, owner
if held then
    state, expires, owner = string.match(held, '^([01]):(%d+):(.+)$')
    if not state then return redis.error_reply('expected a record, found another value') end
end
"""
# ARGV: owner, now, and for the first two: expiry, milliseconds until the server may clear it away
_CLAIM: Final = (
    _READ
    + """
if held and owner ~= ARGV[1] and tonumber(expires) > tonumber(ARGV[2]) then return 2 + tonumber(state) end
redis.call('SET', KEYS[1], '0:' .. ARGV[3] .. ':' .. ARGV[1], 'PX', ARGV[4])
if held and owner ~= ARGV[1] then return 1 end
return 0
"""
)
_FINISH: Final = (
    _READ
    + """
if not held or owner ~= ARGV[1] or tonumber(expires) <= tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], '1:' .. ARGV[3] .. ':' .. ARGV[1], 'PX', ARGV[4])
return 1
"""
)
_RELEASE: Final = (
    _READ
    + """
if not held or owner ~= ARGV[1] or state ~= '0' or tonumber(expires) <= tonumber(ARGV[2]) then return 0 end
return redis.call('DEL', KEYS[1])
"""
)
_RECORD: Final = re.compile(rb"([01]):([0-9]+):(.+)")


class RedisDedupStore:
    """Records in a Redis server. Thread-safe, like ``client``.

    ``client`` is a ``redis.Redis``; set its timeouts, since a listener waits for it. Every key begins with ``prefix``.
    ``clock`` is the time of guards that have none of their own.
    Messages whose records the server loses (memory policy, failover, no append-only file) are consumed again.

    Raises:
        ConfigError: The client is one for asyncio.
        MissingExtraError: The extra ``redis`` is not installed.
    """

    blocking = True

    def __init__(self, client: Redis, *, prefix: str = "MSGDEDUP:", clock: Clock | None = None) -> None:
        try:
            from redis import exceptions
        except ImportError as error:
            raise MissingExtraError("a dedup store in Redis", "redis") from error
        if inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
            kind = type(client)
            raise ConfigError(
                f"client: expected one that waits, redis.Redis, found {kind.__module__}.{kind.__name__}; "
                "a guard calls its store in a thread if the listener is a coroutine"
            )
        self._errors: Any = exceptions
        self.clock = clock
        self.client = client
        self.prefix = prefix
        self._scripts = {
            "claim": client.register_script(_CLAIM),
            "finish": client.register_script(_FINISH),
            "release": client.register_script(_RELEASE),
        }

    def claim(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> Claim:
        outcome = self._run("claim", key, owner, now_ms, expires_at_ms, _lifetime_ms(now_ms, expires_at_ms))
        return CLAIMS[outcome]

    def finish(self, key: str, owner: str, now_ms: int, expires_at_ms: int) -> bool:
        lifetime_ms = _lifetime_ms(now_ms, expires_at_ms)
        return self._run("finish", key, owner, now_ms, expires_at_ms, lifetime_ms) == 1

    def release(self, key: str, owner: str, now_ms: int) -> bool:
        return self._run("release", key, owner, now_ms) == 1

    def read(self, key: str, now_ms: int) -> DedupRecord | None:
        value: Any = self._answered(key, lambda: self.client.get(self.prefix + key))
        if value is None:
            return None
        match = _RECORD.fullmatch(value.encode() if isinstance(value, str) else value)
        if match is None:
            raise DedupStoreError(f"{self.prefix}{key}: expected a record, found another value")
        record = DedupRecord(match[1] == b"1", match[3].decode(), int(match[2]))
        return record if record.expires_timestamp_ms > now_ms else None

    def purge(self, now_ms: int, limit: int) -> int:
        """Do nothing: the server removes expired records."""
        return 0

    def many(self, operations: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Make several calls in one round trip; return the result or the error of each.

        ``operations`` are names and arguments. Each call is atomic.
        """

        def ask() -> list[Any]:
            pipeline = self.client.pipeline(transaction=False)
            for name, (key, *arguments) in operations:
                if name == "read":  # rare; sent separately below
                    continue
                if name != "release":
                    arguments.append(_lifetime_ms(arguments[1], arguments[2]))
                pipeline.evalsha(self._scripts[name].sha, 1, self.prefix + key, *arguments)
            return pipeline.execute(raise_on_error=False)

        answers = self._answered("", ask)
        replies = iter(answers)
        return [self._answer(name, arguments, replies) for name, arguments in operations]

    def _answer(self, name: str, arguments: tuple[Any, ...], replies: Iterator[Any]) -> object:
        answer: Any = None if name == "read" else next(replies)
        if name == "read" or isinstance(answer, self._errors.NoScriptError):
            try:
                return getattr(self, name)(*arguments)
            except DedupStoreError as error:
                return error
        if isinstance(answer, self._errors.RedisError):
            return self._failure(arguments[0], answer)
        return CLAIMS[answer] if name == "claim" else answer == 1

    def _run(self, name: str, key: str, *arguments: str | int) -> int:
        outcome: int = self._answered(key, lambda: self._scripts[name](keys=(self.prefix + key,), args=arguments))
        return outcome

    def _answered(self, key: str, ask: Callable[[], T]) -> T:
        """Return the answer to a call, which is repeated on a fresh connection if the one that it had was dead."""
        try:
            try:
                return ask()
            except self._errors.ConnectionError:  # the server was restarted, or an idle connection was cut
                return ask()
        except self._errors.RedisError as error:
            raise self._failure(key, error) from error

    def _failure(self, key: str, error: Exception) -> DedupStoreError:
        return DedupStoreError(f"{self.prefix}{key}: {error}")


def _lifetime_ms(now_ms: int, expires_at_ms: int) -> int:
    return max(1, expires_at_ms - now_ms) + _MARGIN_MS
