"""What the registry is asked, what it is told, and what is said when it refuses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from laminar.schemas.codec import RECORDS, Codec
from laminar.schemas.errors import ConfigError, DecodeError, Unavailable
from laminar.schemas.framing import registered_form
from laminar.schemas.schema_set import PACKAGED
from laminar.streams.broker.certificate import Authority
from laminar.streams.registry import RegistryConfig
from laminar.streams.registry.client import SchemaRegistry
from tests.integration.streams.registry.conftest import Open, put, record_schema
from tests.support.apicurio import Apicurio
from tests.support.every_record import every_record
from tests.support.gate import Gate, gate

A = {"name": "a", "type": "long"}
B = {"name": "b", "type": "long", "default": 0}
C = {"name": "c", "type": "long"}


def test_every_record_has_a_subject_of_its_name_that_may_only_change_compatibly(
    apicurio: Apicurio, open_registry: Open
) -> None:
    Codec(registry=open_registry()).prepare()
    assert {f"laminar.{name}" for name in RECORDS} <= set(apicurio.get("subjects"))  # type: ignore[call-overload]
    for name in RECORDS:
        assert apicurio.get(f"config/laminar.{name}") == {"compatibilityLevel": "FULL_TRANSITIVE"}
        assert apicurio.get(f"subjects/laminar.{name}/versions") == [1]


def test_a_second_process_registers_nothing_and_gets_the_same_ids(open_registry: Open, counted: Gate) -> None:
    first, second = Codec(registry=open_registry()), Codec(registry=open_registry(counted.url))
    first.prepare()
    second.prepare()
    assert not [asked for asked in counted.requests if asked.startswith("PUT") or "/versions" in asked]
    for record in every_record():
        assert first.encode(record) == second.encode(record)


def test_the_registry_is_asked_for_schemas_and_never_for_a_record(open_registry: Open, counted: Gate) -> None:
    codec, reader = Codec(registry=open_registry(counted.url)), Codec(registry=open_registry(counted.url))
    codec.prepare()
    asked = len(counted.requests)
    frames = [(record, codec.encode(record)) for record in every_record() for _ in range(50)]
    assert len(counted.requests) == asked
    for record, frame in frames:
        assert reader.decode(frame) == record
    assert len(counted.requests) == asked + len(RECORDS)


@pytest.mark.parametrize("name", ["RolloutStatus", "ScoredTrajectory"])
def test_the_registry_takes_both_versions_of_a_record_that_changed_in_either_order(
    apicurio: Apicurio, open_registry: Open, name: str
) -> None:
    forms = [registered_form(PACKAGED._load(f"laminar.v{version}.{name}").whole) for version in (1, 2)]
    for order in (forms, forms[::-1]):
        subject = f"laminar.{name}{id(order)}"
        for form in order:
            open_registry().ids_of({subject: form})
        assert apicurio.get(f"subjects/{subject}/versions") == [1, 2]


def test_a_schema_that_is_not_compatible_is_refused_with_the_subject_and_what_to_do(
    open_registry: Open, name: str
) -> None:
    open_registry().ids_of({name: record_schema(name, A)})
    open_registry().ids_of({name: record_schema(name, A, B)})
    with pytest.raises(
        ConfigError, match=rf"refuses this release's schema of subject {name} \(409\): .*another regist"
    ):
        open_registry().ids_of({name: record_schema(name, A, B, C)})
    with pytest.raises(ConfigError, match="not compatible"):
        open_registry().ids_of({name: record_schema(name, B)})


def test_a_compatibility_that_somebody_chose_stays(apicurio: Apicurio, open_registry: Open, name: str) -> None:
    put(f"{apicurio.url}/config/{name}", {"compatibility": "BACKWARD"})
    open_registry().ids_of({name: record_schema(name, A)})
    assert apicurio.get(f"config/{name}") == {"compatibilityLevel": "BACKWARD"}


def test_with_null_the_compatibility_is_left_to_the_registry(
    apicurio: Apicurio, open_registry: Open, name: str
) -> None:
    open_registry(compatibility=None).ids_of({name: record_schema(name, A)})
    assert apicurio.get(f"config/{name}") == {"compatibilityLevel": "NONE"}


def test_without_leave_to_register_what_is_missing_is_said_and_what_is_there_is_used(
    open_registry: Open, counted: Gate, name: str
) -> None:
    reader = open_registry(counted.url, register_schemas=False)
    with pytest.raises(ConfigError, match=f"under subject {name}, and log.registry.register_schemas is false"):
        reader.ids_of({name: record_schema(name, A)})
    registered = open_registry().ids_of({name: record_schema(name, A)})
    assert reader.ids_of({name: record_schema(name, A)}) == registered
    assert not [asked for asked in counted.requests if asked.startswith("PUT") or "/versions" in asked]


def test_a_login_from_the_environment_and_an_authority_from_a_file(
    apicurio: Apicurio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority.make(tmp_path)
    served = authority.issue("registry", hosts=["127.0.0.1"])
    monkeypatch.setenv("REGISTRY_LOGIN", "someone:hush")
    with gate(apicurio.url, login="someone:hush", key=served.key, chain=served.chain) as secured:

        def opened(**client: object) -> SchemaRegistry:
            settings = RegistryConfig.model_validate({"url": secured.url, "timeout_s": 20, "client": client})
            return SchemaRegistry(settings)

        trusted = {"ssl.ca.location": str(authority.certificate.chain)}
        Codec(registry=opened(**trusted, **{"basic.auth.user.info": {"env": "REGISTRY_LOGIN"}})).prepare()
        (tmp_path / "login").write_text("someone:hush\n")
        Codec(registry=opened(**trusted, **{"basic.auth.user.info": {"file": str(tmp_path / "login")}})).prepare()
        with pytest.raises(ConfigError, match=r"refuses the login \(401\): check log.registry.client") as refused:
            Codec(registry=opened(**trusted, **{"basic.auth.user.info": "someone:wrong-hush"})).prepare()
        assert "hush" not in str(refused.value)
        with pytest.raises(ConfigError, match=r"no secure connection to https://.*ssl\.ca\.location"):
            Codec(registry=opened()).prepare()
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:{port}", "does not answer as a schema registry: it answers 404"),
        ("http://127.0.0.1:{port}/apis", "/apis/ccompat/v7 behind the port"),
        ("http://127.0.0.1:{port}/ui/x.html?", "does not answer as a schema registry"),
    ],
)
def test_a_url_that_is_no_registry_is_one_line(apicurio: Apicurio, url: str, words: str) -> None:
    registry = SchemaRegistry(RegistryConfig(url=url.format(port=apicurio.port)))
    with pytest.raises(ConfigError, match=words) as refused:
        Codec(registry=registry).prepare()
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:8081"])
def test_a_registry_that_is_not_there_is_waited_for_and_then_unavailable(url: str) -> None:
    with pytest.raises(
        Unavailable, match=f"schema registry {url} has our schemas: not within 0.6 s.*check log.registry"
    ):
        Codec(registry=SchemaRegistry(RegistryConfig(url=url, timeout_s=0.6))).prepare()


def test_a_registry_that_is_overloaded_for_a_moment_is_asked_again(open_registry: Open, counted: Gate) -> None:
    counted.status = 503
    registry = open_registry(counted.url, timeout_s=1.0)
    with pytest.raises(Unavailable, match="it answers 503"):
        registry.schema_of(1)
    assert len(counted.requests) >= 2
    counted.status = None
    Codec(registry=registry).prepare()


def test_an_id_that_the_registry_does_not_have_is_asked_for_again_after_a_minute_only(
    apicurio: Apicurio, counted: Gate
) -> None:
    now = time.monotonic()
    registry = SchemaRegistry(RegistryConfig(url=counted.url), clock=lambda: now)
    for _ in range(3):
        with pytest.raises(DecodeError, match=f"schema id 424242: unknown to the schema registry {counted.url}"):
            registry.schema_of(424242)
    assert counted.requests == ["GET /schemas/ids/424242"]
    now += 61.0
    with pytest.raises(DecodeError, match="424242"):
        registry.schema_of(424242)
    assert len(counted.requests) == 2


def test_a_registry_that_answers_nothing_is_given_up_on_in_time(apicurio: Apicurio, open_registry: Open) -> None:
    registry = open_registry(timeout_s=1.0)
    apicurio.pause()
    try:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="has schema id 1: not within 1 s"):
            registry.schema_of(1)
        assert time.monotonic() - began < 30.0
    finally:
        apicurio.go_on()
