"""Why a broker cannot be reached or refuses us, in one line that says what to do.

A wrong setting is a ConfigError: trying again cannot help. A broker that is not there is Unavailable. What only
looks like a wrong setting, as the connection breaks, is looked into (``probe``) before it is called one: a broker
behind a load balancer that is just restarting breaks connections too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError

from laminar.schemas.errors import ConfigError, LaminarError, Unavailable
from laminar.streams.kafka.probe import Found, look
from laminar.streams.kafka.settings import closest_name

__all__ = ["REJECTED", "cannot_connect", "rejected", "wrong_setting"]

REJECTED = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL})
"""The broker said no; or we do, to its certificate."""

_PROTOCOLS = "PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"
_CHOICES = {
    "security.protocol": _PROTOCOLS,
    "sasl.mechanism": "SCRAM-SHA-512, SCRAM-SHA-256, PLAIN, OAUTHBEARER, GSSAPI",
    "sasl.mechanisms": "SCRAM-SHA-512, SCRAM-SHA-256, PLAIN, OAUTHBEARER, GSSAPI",
    "broker.address.family": "any, v4, v6",
    "ssl.endpoint.identification.algorithm": "https, none",
}


def cannot_connect(bootstrap: str, client: Mapping[str, Any], what: str, seconds: float) -> LaminarError | None:
    """No broker has answered yet: why, as far as it can be found out now; None when all looks well."""
    addresses = [address.strip() for address in bootstrap.split(",")]
    found, address = Found(), addresses[0]
    for address in addresses:
        found = look(address, client)
        if not found.trouble:
            break
    wrong = _wrong(found, address, client)
    if wrong is not None:
        return ConfigError(wrong)
    if found.kafka:
        return None
    why = found.trouble or f"{address} takes connections but does not answer as a Kafka broker does"
    return Unavailable(
        f"Kafka broker {bootstrap}: {what}: no answer within {seconds:g} s: {why} (is log.bootstrap right, and the "
        "broker up?)"
    )


def _wrong(found: Found, address: str, client: Mapping[str, Any]) -> str | None:
    """The setting that does not fit what speaks there."""
    protocol = str(client.get("security.protocol", "PLAINTEXT")).upper()
    by_tls, by_sasl = protocol.endswith("SSL"), protocol.startswith("SASL")
    if found.trouble or not (found.kafka or found.tls):
        return None
    asks = f" and asks for a login by {' or '.join(found.sasl)}" if found.sasl else ""
    if found.kafka or not by_tls:
        right = ("SASL_" if found.sasl or (by_sasl and not found.kafka) else "") + ("SSL" if found.tls else "PLAINTEXT")
        if right != protocol:
            speaks = "speaks TLS" if found.tls else "speaks no TLS"
            none = " and asks for no login" if found.kafka and by_sasl and not found.sasl else ""
            return f"log.client.security.protocol: {address} {speaks}{asks or none}: set {right}, not {protocol}"
    if found.untrusted:
        return (
            f"log.client.ssl.ca.location: the certificate of {address} is not accepted ({found.untrusted}): name the "
            "PEM file of the authority that signed it, and use a host name that stands in it"
        )
    if found.wants_certificate:
        return (
            f"log.client.ssl.certificate.location: {address} wants a certificate of a client that it trusts: "
            "set it, and ssl.key.location"
        )
    mechanism = str(client.get("sasl.mechanisms", client.get("sasl.mechanism", "GSSAPI")))
    if found.sasl and mechanism not in found.sasl:
        return f"log.client.sasl.mechanism: {address} takes {' or '.join(found.sasl)}, not {mechanism}"
    return None


def rejected(bootstrap: str, client: Mapping[str, Any], reason: str) -> ConfigError:
    """The broker, or we, said no while connecting."""
    if "state: broker's supported mechanisms" in reason or "nsupported SASL mechanism" in reason or "SSL" in reason:
        for address in bootstrap.split(","):
            wrong = _wrong(look(address, client), address.strip(), client)
            if wrong is not None:
                return ConfigError(wrong)
    if "uthentication failed" in reason:
        user = str(client.get("sasl.username", ""))
        mechanism = client.get("sasl.mechanisms", client.get("sasl.mechanism", "GSSAPI"))
        return ConfigError(
            f"log.client.sasl.username, sasl.password: {bootstrap} does not accept the user '{user}' with this "
            f"password ({mechanism})"
        )
    return ConfigError(f"log.client: {bootstrap} refuses the connection: {reason}")


def wrong_setting(text: str, client: Mapping[str, Any]) -> ConfigError:
    """librdkafka did not take our settings. ``text`` must not contain a secret."""
    unknown = re.search(r'No such configuration property: "([^"]*)"', text)
    if unknown is not None:
        name = unknown[1]
        return ConfigError(f"log.client.{name}: librdkafka has no such setting{closest_name(name)}")
    value = re.search(r'for configuration property "([^"]*)"', text)
    if value is not None:
        valid = f" (valid: {_CHOICES[value[1]]})" if value[1] in _CHOICES else f": {text}"
        return ConfigError(f"log.client.{value[1]}: not a valid value{valid}")
    failed = re.search(r"([a-z.]+\.location) failed", text)
    if failed is not None:
        return ConfigError(f"log.client.{failed[1]}: {_of_file(failed[1], client, text)}")
    return ConfigError(f"log.client: {text}")


def _of_file(name: str, client: Mapping[str, Any], text: str) -> str:
    path = Path(str(client.get(name, "")))
    try:
        with path.open("rb") as opened:
            opened.read(1)
    except OSError as e:
        return f"cannot read {path}: {e.strerror}"
    if "key values mismatch" in text:
        return f"{path} is not the key of ssl.certificate.location"
    if "key" in name:
        return f"{path} is not a PEM file with a key, or ssl.key.password is missing or wrong"
    return f"{path} is not a PEM file with a certificate"
