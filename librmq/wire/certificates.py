"""Certificates for TLS: a server's context from a certificate and key, with plain errors, and a self-signed pair."""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from tempfile import TemporaryDirectory
from typing import Final

from librmq.clock import SystemClock
from librmq.errors import ConfigError, MissingExtraError

_DAYS: Final = 365
_BEFORE: Final = timedelta(days=1)
"""A client's clock may be behind."""


def server_context(chain: bytes, key: bytes) -> ssl.SSLContext:
    """Return the context of a server with a certificate chain and a private key, both in PEM.

    Raises:
        ConfigError: They are not a pair that a server can use.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with TemporaryDirectory() as folder:  # readable by this user only
        paths = os.path.join(folder, "chain"), os.path.join(folder, "key")
        for path, data in zip(paths, (chain, key), strict=True):
            with open(path, "wb") as file:
                file.write(data)
        try:
            context.load_cert_chain(*paths, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"TLS: {_why(chain, key, error)}") from error
    return context


def _why(chain: bytes, key: bytes, error: Exception) -> str:
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        return "the certificate is not in PEM: expected a file with BEGIN CERTIFICATE"
    if b"PRIVATE KEY-----" not in key:
        return "the key is not in PEM: expected a file with BEGIN PRIVATE KEY"
    if b"ENCRYPTED" in key:
        return "the key has a password: expected one without, as from `openssl pkey -in KEY -out PLAIN`"
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return "the key belongs to another certificate: expected the key that this one was made with"
    return f"the certificate and its key can't be used: {error}"


def self_signed(names: Iterable[str]) -> tuple[bytes, bytes]:
    """Return a new self-signed certificate for these hosts and addresses, and its private key, in PEM.

    Raises:
        MissingExtraError: The extra ``grpc`` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingExtraError("a self-signed certificate", "grpc") from error

    def named(name: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            return x509.DNSName(name)

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "librmq serve")])
    now = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([named(name) for name in dict.fromkeys(names)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
