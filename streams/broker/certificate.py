"""Certificates for a development broker: an authority of its own, made with ``openssl``, and what it signs.

For one machine and a few days; real clusters have their own authority.

>>> ca = Authority.make(Path("certs"))                                  # doctest: +SKIP
>>> ca.issue("broker", hosts=["127.0.0.1", "localhost"]).chain          # doctest: +SKIP
PosixPath('certs/broker.pem')
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laminar.schemas.errors import ConfigError

__all__ = ["Authority", "Certificate"]

_DAYS = "365"
_OPENSSL_S = 30.0
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A key and the certificate for it, as PEM files."""

    key: Path
    chain: Path

    def store(self) -> Path:
        """Both in one file, as Kafka's brokers want it."""
        both = self.key.with_suffix(".store.pem")
        _write_private(both, self.key.read_text(encoding="ascii") + self.chain.read_text(encoding="ascii"))
        return both


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in a folder."""

    folder: Path
    certificate: Certificate

    @classmethod
    def make(cls, folder: Path, name: str = "laminar development") -> Authority:
        """Take the one in this folder, or make it. Raises ConfigError without openssl."""
        folder.mkdir(parents=True, exist_ok=True)
        made = Certificate(folder / "ca.key", folder / "ca.pem")
        if not made.chain.exists():
            files = ("-keyout", str(made.key), "-out", str(made.chain))
            _openssl("req", "-x509", "-nodes", *_CURVE, "-days", _DAYS, "-subj", f"/CN={name}", *files)
            made.key.chmod(0o600)
        return cls(folder, made)

    @property
    def trust(self) -> Path:
        """What ``ssl.ca.location`` has to name."""
        return self.certificate.chain

    def issue(self, name: str, hosts: Sequence[str] = (), *, password: str | None = None) -> Certificate:
        """A certificate for this common name, valid for these hosts; its key is encrypted if a password is given."""
        made = Certificate(self.folder / f"{name}.key", self.folder / f"{name}.pem")
        names = ",".join(f"{_kind(host)}:{host}" for host in hosts) or f"DNS:{name}"
        encrypted = ("-passout", "env:LAMINAR_KEY_PASSWORD") if password is not None else ("-nodes",)
        _openssl(
            *("req", "-x509", *encrypted, *_CURVE, "-days", _DAYS, "-subj", f"/CN={name}"),
            *("-CA", str(self.certificate.chain), "-CAkey", str(self.certificate.key)),
            *("-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", str(made.key), "-out", str(made.chain)),
            password=password,
        )
        made.key.chmod(0o600)
        return made


def _kind(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "DNS"
    return "IP"


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)


def _openssl(*arguments: str, password: str | None = None) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ConfigError("broker: certificates are made with openssl, which is not on PATH: install it")
    secret = {} if password is None else {"LAMINAR_KEY_PASSWORD": password}
    done = subprocess.run(
        [openssl, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_OPENSSL_S,
        check=False,
        env={**os.environ, **secret},
    )
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(f"broker: openssl failed: {said[-1] if said else 'no reason given'}")
