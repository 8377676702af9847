"""Asks an address what speaks there, once librdkafka has failed to connect: TCP, TLS, Kafka, and whether by SASL.

librdkafka says "disconnected" for a broker that wants TLS, for one that wants a password and for one that is just
restarting. A look of our own, of a few seconds, tells these apart.

>>> look("127.0.0.1:9092", {}).sasl is None                      # doctest: +SKIP
True
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Found", "host_and_port", "look"]

_WAIT_S = 2.0
_API_VERSIONS, _SASL_HANDSHAKE = 18, 17
_MAX_ANSWER_BYTES = 1_000_000
_OTHER_AUTHORITIES = frozenset({"ssl.ca.pem", "ssl.ca.certificate.stores", "ssl_ca"})
_OTHER_CERTIFICATES = frozenset({"ssl.certificate.pem", "ssl.keystore.location", "ssl_certificate"})
"""Further ways to give librdkafka a certificate, which a look goes without: it judges nothing by its absence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What speaks at an address."""

    trouble: str = ""
    """Why there is no connection at all; the rest is then unknown."""
    tls: bool = False
    untrusted: str = ""
    """Why the certificate that is shown is not accepted, with the user's own settings."""
    wants_certificate: bool = False
    """It hung up on a client without a certificate, or with one that it does not trust."""
    kafka: bool = False
    """It answered as a Kafka broker does."""
    sasl: tuple[str, ...] | None = None
    """The mechanisms that it accepts; None: it does not ask for SASL."""


def host_and_port(address: str) -> tuple[str, int]:
    """Both parts of ``host:port``; the brackets of an IPv6 address are dropped."""
    host, _, port = address.strip().rpartition(":")
    return host.strip("[]"), int(port)


def look(address: str, client: Mapping[str, Any]) -> Found:
    """Never raises; takes a few times two seconds at most. ``client``: the user's settings of librdkafka."""
    host, port = host_and_port(address)
    try:
        connection = socket.create_connection((host, port), timeout=_WAIT_S)
    except socket.gaierror as e:
        return Found(trouble=f"the name '{host}' is not known ({e.strerror})")
    except TimeoutError:
        return Found(trouble=f"{address} does not answer")
    except OSError as e:
        refused = isinstance(e, ConnectionRefusedError)
        return Found(trouble=f"nothing listens on {address}" if refused else f"{address}: {e.strerror or e}")
    with connection:
        if _answers(connection):
            return Found(kafka=True, sasl=_mechanisms(connection))
    return _look_by_tls(host, port, client)


def _look_by_tls(host: str, port: int, client: Mapping[str, Any]) -> Found:
    try:
        with _tls(host, port, _context({}, check=False)):
            pass
    except (OSError, ValueError):
        return Found()
    try:
        with _tls(host, port, _context(client, check=_can_check(client))):
            pass
    except ssl.SSLCertVerificationError as e:
        return Found(tls=True, untrusted=e.verify_message or "it cannot be verified")
    except (OSError, ValueError):
        pass
    try:
        with _tls(host, port, _context(client, check=False)) as connection:
            if not _answers(connection):
                return Found(tls=True, wants_certificate=_OTHER_CERTIFICATES.isdisjoint(client))
            return Found(tls=True, kafka=True, sasl=_mechanisms(connection))
    except (OSError, ValueError):
        return Found(tls=True)


def _can_check(client: Mapping[str, Any]) -> bool:
    """Whether the user wants the broker's certificate to be checked, by authorities that we can load as well."""
    wanted = str(client.get("enable.ssl.certificate.verification", True)).lower()
    return wanted in ("true", "t", "1") and _OTHER_AUTHORITIES.isdisjoint(client)


def _context(client: Mapping[str, Any], *, check: bool) -> ssl.SSLContext:
    ca = client.get("ssl.ca.location")
    context = ssl.create_default_context(cafile=str(ca) if ca and ca != "probe" else None)
    if not check:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif str(client.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        context.check_hostname = False
    certificate = client.get("ssl.certificate.location")
    if certificate:
        password = client.get("ssl.key.password")
        context.load_cert_chain(
            certificate, client.get("ssl.key.location"), None if password is None else str(password)
        )
    return context


def _tls(host: str, port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    plain = socket.create_connection((host, port), timeout=_WAIT_S)
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise


def _answers(connection: socket.socket) -> bool:
    """Whether ApiVersions, which every broker answers before any login, has an answer."""
    return _ask(connection, _API_VERSIONS, b"") is not None


def _mechanisms(connection: socket.socket) -> tuple[str, ...] | None:
    """Asks to log in by a mechanism that does not exist: a broker that wants a login lists its own."""
    answer = _ask(connection, _SASL_HANDSHAKE, struct.pack(">h", 1) + b"?")
    if answer is None or len(answer) < 6:
        return None
    _, count = struct.unpack_from(">hi", answer)
    names, at = [], 6
    try:
        for _ in range(count):
            (length,) = struct.unpack_from(">h", answer, at)
            names.append(answer[at + 2 : at + 2 + length].decode("ascii", "replace"))
            at += 2 + length
    except struct.error:
        return None
    return tuple(sorted(names)) or None


def _ask(connection: socket.socket, api: int, body: bytes) -> bytes | None:
    """The answer to a request of version 0, without its correlation id; None when there is none."""
    name = b"laminar"
    request = struct.pack(">hhih", api, 0, 1, len(name)) + name + body
    try:
        connection.sendall(struct.pack(">i", len(request)) + request)
        head = _read(connection, 8)
        if head is None:
            return None
        size, correlation = struct.unpack(">ii", head)
        if correlation != 1 or not 4 <= size <= _MAX_ANSWER_BYTES:
            return None
        return _read(connection, size - 4)
    except (OSError, ValueError):
        return None


def _read(connection: socket.socket, size: int) -> bytes | None:
    out = b""
    while len(out) < size:
        part = connection.recv(size - len(out))
        if not part:
            return None
        out += part
    return out
