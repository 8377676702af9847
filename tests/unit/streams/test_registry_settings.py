from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from laminar.pipeline.config.explaining import explain, resolved_yaml
from laminar.pipeline.config.loading import load_config
from laminar.schemas.errors import ConfigError
from laminar.streams.open import KafkaLogConfig, SqliteLogConfig, open_codec
from laminar.streams.registry import RegistryConfig
from laminar.streams.registry.client import SchemaRegistry

RUN_FILE = """\
name: demo
steps: 2
groups_per_step: 1
group_size: 4
model: {path: model}
operators: {reward: {}}
log:
  kind: kafka
  registry:
    url: https://registry:8081
    client:
      ssl.ca.location: /etc/ca.pem
      basic.auth.user.info: {env: REGISTRY_LOGIN}
"""


def load(tmp_path: Path, *arguments: str, text: str = RUN_FILE) -> Any:
    (tmp_path / "run.yaml").write_text(text)
    return load_config(tmp_path / "run.yaml", arguments, environ={}, check_files=False)


def test_the_configuration_shows_the_registry_and_where_each_value_came_from(tmp_path: Path) -> None:
    shown = {setting.name: (setting.value, setting.source) for setting in explain(load(tmp_path))}
    assert shown["log.registry.url"] == ('"https://registry:8081"', f"{tmp_path}/run.yaml:10")
    assert shown["log.registry.compatibility"] == ('"FULL_TRANSITIVE"', "default")
    assert shown["log.registry.client.ssl.ca.location"] == ('"/etc/ca.pem"', f"{tmp_path}/run.yaml:12")
    assert "REGISTRY_LOGIN" in str([value for name, value in shown.items() if "user.info" in name])


def test_a_login_is_given_by_where_it_stands_and_not_repeated_when_it_is_written_down(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"user\.info: a secret is given by where it stands") as refused:
        load(tmp_path, "log.registry.client.basic.auth.user.info=someone:hush")
    assert "hush" not in str(refused.value)


def test_the_processes_of_a_run_get_the_registry_as_it_was_given(tmp_path: Path) -> None:
    config = load(tmp_path).config
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "resolved.yaml", (), environ={}, check_files=False).config.log == config.log


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("registry:8081", "must begin with http:// or https:// and a host"),
        ("http://", "must begin with http:// or https:// and a host"),
        ("http://registry:none", "is not valid"),
        ("https://someone:hush@registry:8081", "must not carry a login: use client"),
        ("http://a:8081,b:8081", "must begin with http"),
    ],
)
def test_a_url_that_cannot_be_right_is_refused_and_a_login_in_it_not_repeated(
    tmp_path: Path, url: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"log.registry: url {words}") as refused:
        load(tmp_path, f"log.registry.url={url}")
    assert "hush" not in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_only_a_kafka_log_has_a_registry(tmp_path: Path) -> None:
    text = RUN_FILE.replace("kind: kafka", "kind: sqlite")
    with pytest.raises(ConfigError, match=r"log.registry: unknown key \("):
        load(tmp_path, text=text)
    with pytest.raises(ValidationError):
        SqliteLogConfig.model_validate({"registry": {"url": "http://a"}})


def test_without_the_extras_packages_the_message_is_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    needing = ("confluent_kafka.schema_registry", "laminar.streams.registry.client", "authlib")
    for name in [name for name in sys.modules if name.startswith(needing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "authlib", None)
    config = KafkaLogConfig(registry=RegistryConfig(url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match=r"not installed \(authlib.*\): pip install 'laminar-rl\[registry\]'"):
        open_codec(config)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ({"basic.auth.user.inf": "x"}, "log.registry.client: Unrecognized properties: basic.auth.user.inf"),
        (
            {"ssl.ca.location": "/no/such/file"},
            r"ssl\.\*\.location: No such file or directory \(given: /no/such/file\)",
        ),
        ({"ssl.key.location": "/no/such/file"}, "ssl.certificate.location required"),
        ({"basic.auth.user.info": {"env": "NO_SUCH_VARIABLE"}}, "user.info: the environment variable NO_SUCH_VARIABLE"),
    ],
)
def test_settings_that_the_client_refuses_are_one_line(client: dict[str, object], words: str) -> None:
    config = RegistryConfig.model_validate({"url": "http://127.0.0.1:1", "client": client})
    with pytest.raises(ConfigError, match=words) as refused:
        SchemaRegistry(config)
    assert len(str(refused.value).splitlines()) == 1
