"""The route of a command to the brokers of a cluster: ``--route``, with its keys and its TLS."""

from __future__ import annotations

import argparse
import os
import re
import ssl
from typing import Any, Final

from librmq.errors import InputError
from librmq.wire.remote import RemoteRoute, connect

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
    access = access_of(arguments)
    is_tls, ca_file = access.pop("tls"), access.pop("ca_file")
    tls = None
    if is_tls:
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # an SSLError is one
            raise InputError(f"--tls-ca {ca_file}: {error.strerror or error}: expected certificates in PEM") from None
    return connect(**access, tls=tls)


def access_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return address, keys and TLS of the cluster in ``--route``: ``tls`` is whether, ``ca_file`` whom to trust."""
    keys = _keys(arguments)
    ca_file = arguments.tls_ca or os.environ.get("LIBRMQ_TLS_CA")
    return {
        "address": arguments.route,
        "access_key": keys.get("accessKey"),
        "secret_key": keys.get("secretKey"),
        "security_token": keys.get("securityToken"),
        "tls": bool(arguments.tls or ca_file),
        "ca_file": ca_file,
    }


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
