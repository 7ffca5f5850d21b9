"""Access keys: each request carries the key's name and an HMAC-SHA1 of its fields and body.

Mirrors ``AclClientRPCHook`` and ``AclUtils``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

from librmq.errors import ConfigError
from librmq.wire.remoting.frames import Frame

_KEY: Final = "AccessKey"
_TOKEN: Final = "SecurityToken"
_SIGNATURE: Final = "Signature"
_UNSIGNED: Final = frozenset((_SIGNATURE, "_UNIQUE_KEY_QUERY"))


class AccessKeys:
    """An access key with its secret, which signs requests. Thread-safe."""

    def __init__(self, access_key: str, secret_key: str, security_token: str | None = None) -> None:
        for name, value in (("access_key", access_key), ("secret_key", secret_key)):
            if not value:
                raise ConfigError(f"{name}: expected text, because a key has a name and a secret: found none")
        self.access_key = access_key
        self._secret = secret_key.encode()
        self._token = security_token

    def __repr__(self) -> str:
        return f"AccessKeys({self.access_key!r})"

    def sign(self, frame: Frame) -> None:
        """Add key and signature to the fields of a request."""
        fields = frame.fields
        fields[_KEY] = self.access_key
        if self._token is not None:
            fields[_TOKEN] = self._token
        signed = "".join(fields[name] for name in sorted(fields) if name not in _UNSIGNED).encode("utf-8", "replace")
        digest = hmac.new(self._secret, signed + frame.body, hashlib.sha1).digest()
        fields[_SIGNATURE] = base64.b64encode(digest).decode()
