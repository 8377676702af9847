"""A log opened from its settings: one set of defaults, secrets by reference, addresses that are addresses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

from laminar.schemas.errors import ConfigError
from laminar.streams.bootstrap import check_bootstrap
from laminar.streams.kafka.settings import KafkaSettings, closest_name
from laminar.streams.open import KafkaLogConfig, open_log
from laminar.streams.secret import FromEnvironment, FromFile, is_secret_name


def test_what_a_run_file_can_set_of_kafka_has_the_adapters_own_defaults() -> None:
    own = KafkaSettings(bootstrap="127.0.0.1:9092")
    config = KafkaLogConfig()
    only_in_a_run_file = {"kind", "topic_prefix", "registry"}
    names = set(KafkaLogConfig.model_fields) - only_in_a_run_file
    assert names <= {field.name for field in dataclasses.fields(KafkaSettings)}
    assert {name: getattr(config, name) for name in names} == {name: getattr(own, name) for name in names}


def test_settings_do_not_show_those_of_the_client() -> None:
    assert "hunter2" not in repr(KafkaSettings(bootstrap="a:1", client={"sasl.password": "hunter2"}))


@pytest.mark.parametrize("given", ["broker:9092", "10.0.0.1:1", "a.example:9092, b.example:65535", "[::1]:9092"])
def test_addresses_of_brokers(given: str) -> None:
    check_bootstrap(given)


@pytest.mark.parametrize(
    "given",
    [
        *(
            "",
            " ",
            "broker",
            "broker:",
            ":9092",
            "broker:0",
            "broker:65536",
            "broker:x",
            "::1",
            "[::1]",
            "a:1,",
            "a b:1",
        ),
        *("a:1,", "a b:1", "http://a:1", "[::1]9092", "user@a:1", "a:-1", "a:٣"),
    ],
)
def test_what_is_no_address_of_a_broker(given: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port must be|brackets|empty"):
        check_bootstrap(given)
    with pytest.raises(ConfigError, match=r"^log\.bootstrap: "):
        KafkaSettings(bootstrap=given)
    with pytest.raises(ValidationError):
        KafkaLogConfig(bootstrap=given)


def test_a_secret_is_read_when_the_log_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAFKA_PASSWORD", raising=False)
    by_variable = KafkaLogConfig(client={"sasl.password": FromEnvironment(env="KAFKA_PASSWORD")})
    with pytest.raises(ConfigError, match=r"^log\.client\.sasl\.password: the environment variable KAFKA_PASSWORD "):
        open_log(by_variable, run_id="r")
    monkeypatch.setenv("KAFKA_PASSWORD", "")
    with pytest.raises(ConfigError, match="KAFKA_PASSWORD is empty"):
        open_log(by_variable, run_id="r")
    monkeypatch.setenv("KAFKA_PASSWORD", "hunter2")
    open_log(by_variable, run_id="r").close()
    path = tmp_path / "password"
    by_file = KafkaLogConfig(client={"sasl.password": FromFile(file=path)})
    with pytest.raises(ConfigError, match=rf"log\.client\.sasl\.password: cannot read {path}: No such file"):
        open_log(by_file, run_id="r")
    path.write_text("\n")
    with pytest.raises(ConfigError, match=f"{path} is empty"):
        open_log(by_file, run_id="r")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"{path} is not UTF-8 text"):
        open_log(by_file, run_id="r")


def test_a_file_holds_a_secret_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(" hunter2 \r\n")
    assert FromFile(file=path).read("at") == " hunter2 "


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("sasl.password", True),
        ("ssl.key.password", True),
        ("ssl.keystore.password", True),
        ("ssl.key.pem", True),
        ("sasl.oauthbearer.client.secret", True),
        ("sasl.oauthbearer.assertion.private.key.passphrase", True),
        ("sasl.oauthbearer.config", True),
        ("basic.auth.user.info", True),
        ("api_key", True),
        ("sasl.username", False),
        ("ssl.key.location", False),
        ("ssl.certificate.pem", False),
        ("max_tokens", False),
    ],
)
def test_which_names_are_of_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_the_closest_name_of_a_client_setting() -> None:
    assert closest_name("sasl.pasword") == " (did you mean 'sasl.password'?)"
    assert closest_name("ssl_ca_location") == " (did you mean 'ssl.ca.location'?)"
    assert closest_name("zzz") == ""
