"""What a development broker is told to demand, without starting one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laminar.schemas.errors import ConfigError
from laminar.streams.broker import Authority, Broker, Security


def test_the_protocol_follows_from_what_is_demanded(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    users = {"alice": "secret-1"}
    assert Security().protocol == "PLAINTEXT"
    assert Security(users=users).protocol == "SASL_PLAINTEXT"
    assert Security(authority=authority).protocol == "SSL"
    assert Security(authority=authority, users=users).protocol == "SASL_SSL"
    assert Security(authority=authority, users=users).client("alice") == {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(tmp_path / "ca.pem"),
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": "secret-1",
    }


def test_passwords_show_nowhere_but_in_a_file_of_the_owner(tmp_path: Path) -> None:
    security = Security(users={"alice": "secret-1"}, mechanism="PLAIN")
    assert "secret-1" not in repr(security)
    broker = Broker(tmp_path, port=0, security=security)
    path = broker._write_properties()
    assert "secret-1" in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


def test_what_cannot_be_a_password_or_lacks_its_authority_is_refused() -> None:
    for name, password in {"a;b": "x", "": "x", "a": 'x"y', "b": "x\ny"}.items():
        with pytest.raises(ConfigError, match="names and passwords"):
            Security(users={name: password})
    with pytest.raises(ConfigError, match="client certificates need TLS"):
        Security(client_certificates=True)


def test_an_authority_is_made_once_and_what_it_issues_verifies(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    first = authority.trust.read_bytes()
    assert Authority.make(tmp_path).trust.read_bytes() == first
    issued = authority.issue("broker", ["127.0.0.1", "localhost"], password="hunter2")
    verify = ["openssl", "verify", "-CAfile", str(authority.trust), "-verify_ip", "127.0.0.1", str(issued.chain)]
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0
    assert b"ENCRYPTED" in issued.key.read_bytes()
    assert issued.key.stat().st_mode & 0o077 == 0
    store = authority.issue("other", ["localhost"]).store()
    assert store.stat().st_mode & 0o077 == 0
    assert b"PRIVATE KEY" in store.read_bytes()
    assert b"CERTIFICATE" in store.read_bytes()
