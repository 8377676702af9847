from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from laminar.streams.registry import RegistryConfig
from laminar.streams.registry.client import SchemaRegistry
from tests.support.apicurio import Apicurio, apicurio
from tests.support.gate import Gate, gate

__all__ = ["apicurio"]

Open = Callable[..., SchemaRegistry]


@pytest.fixture
def registry_url(apicurio: Apicurio) -> str:
    """The shared registry, empty but for what runs have registered."""
    return apicurio.url


@pytest.fixture
def open_registry(apicurio: Apicurio) -> Open:
    def make(url: str = apicurio.url, **settings: Any) -> SchemaRegistry:
        return SchemaRegistry(RegistryConfig(url=url, **settings))

    return make


@pytest.fixture
def counted(apicurio: Apicurio) -> Iterator[Gate]:
    """The registry behind a gate that keeps a list of requests."""
    with gate(apicurio.url) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    """The full name of a record that nobody has registered."""
    return f"laminar.Thing{uuid.uuid4().hex[:8]}"


def record_schema(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    namespace, _, short = name.rpartition(".")
    return {"type": "record", "namespace": namespace, "name": short, "fields": list(fields)}


def put(url: str, body: object) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/vnd.schemaregistry.v1+json"}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=10):
        return
