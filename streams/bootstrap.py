"""The addresses of brokers: ``host:port``, several of them with commas between.

>>> check_bootstrap("broker-1:9092,[::1]:9093")
>>> check_bootstrap("broker-1")
Traceback (most recent call last):
    ...
ValueError: 'broker-1' has no port: write HOST:PORT, for example broker-1:9092
"""

from __future__ import annotations

import re

__all__ = ["check_bootstrap"]

_BRACKETED = re.compile(r"\[(?P<host>[0-9A-Fa-f:.%a-z]*)\](?P<rest>.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MAX_PORT = 65535


def check_bootstrap(text: str) -> None:
    """Raise ValueError, with the address and how it should be written, if one of them is none."""
    if not text.strip():
        raise ValueError("is empty: write HOST:PORT, several of them with commas between")
    for given in text.split(","):
        _check_address(given.strip())


def _check_address(address: str) -> None:
    if not address:
        raise ValueError("has an empty address between its commas")
    if "://" in address:
        protocol, _, rest = address.partition("://")
        known = protocol.upper() in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
        security = f", and log.client.security.protocol={protocol.upper()}" if known else ""
        raise ValueError(f"{address!r} is not HOST:PORT: write {rest.partition('/')[0]}{security}")
    bracketed = _BRACKETED.fullmatch(address)
    if bracketed is not None:
        host, colon, port = bracketed["host"], bracketed["rest"][:1], bracketed["rest"][1:]
        shown = f"[{host}]"
    elif address.count(":") > 1:
        raise ValueError(f"{address!r}: an IPv6 address needs brackets: [{address}]:9092")
    else:
        host, colon, port = address.partition(":")
        shown = host or "broker"
        if host and not _NAME.fullmatch(host):
            raise ValueError(f"{address!r} is not HOST:PORT")
    if not host:
        raise ValueError(f"{address!r} has no host: write HOST:PORT, for example broker:9092")
    if colon != ":" or not port:
        raise ValueError(f"{address!r} has no port: write HOST:PORT, for example {shown}:9092")
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= _MAX_PORT:
        raise ValueError(f"{address!r}: the port must be a number from 1 to {_MAX_PORT}, not {port!r}")
