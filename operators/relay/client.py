"""Talks HTTP to one relay: what publishers, sources and other relays need of it.

Every call has a deadline, errors are ours, and a range is read straight into the caller's memory. The connection is
kept open between calls; a client belongs to one thread.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from laminar.operators.relay.manifest import to_json
from laminar.schemas import errors
from laminar.schemas.records import VersionManifest
from laminar.streams.deadline import Deadline

__all__ = ["BOOT_HEADER", "RelayClient"]

BOOT_HEADER = "X-Laminar-Boot"
"""Boot id that the caller believes to talk to; the relay refuses another one's requests with 409."""

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class RelayClient:
    """A connection to one relay."""

    def __init__(self, name: str, url: str, token: str, *, boot_id: str = "", read_timeout_s: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise errors.Unavailable(f"relay {name}: its url {url!r} is not http://host:port")
        self.name = f"relay {name} ({url})"
        self._headers = {"Authorization": f"Bearer {token}"}
        if boot_id:
            self._headers[BOOT_HEADER] = boot_id
        self._timeout_s = read_timeout_s
        self._http = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=read_timeout_s)

    def reserve(self, *, epoch: int, version: int, total_bytes: int, deadline: Deadline) -> dict[str, Any]:
        """Reserve a slot; the answer has ``slot``, ``nonce``, ``path``, ``chunk_bytes``, ``relay_id``, ``boot_id``."""
        wanted = {"epoch": epoch, "version": version, "total_bytes": total_bytes}
        return self._call("POST", "/v1/slots", wanted, deadline)

    def seal(self, slot: int, nonce: str, manifest: VersionManifest, deadline: Deadline) -> dict[str, Any]:
        """Seal a slot; the answer has ``relay_id``, ``boot_id`` and ``url``."""
        body = {"nonce": nonce, "manifest": to_json(manifest)}
        return self._call("POST", f"/v1/slots/{slot}/seal", body, deadline)

    def read_range(self, root_digest: str, start: int, stop: int, *, wait_s: float, deadline: Deadline) -> RangeReader:
        """Ask for bytes ``start`` to ``stop`` (exclusive); the relay sends each chunk as soon as it has verified it.

        ``wait_s``: how long it may wait for one. Raises Unavailable when the first bytes are not there by then.
        """
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        path = f"/v1/versions/{root_digest}/data?wait_s={wait_s:g}"
        answer = self._send("GET", path, None, headers, deadline, wait_s)
        if answer.status != http.client.PARTIAL_CONTENT:
            self._fail(answer)
        return RangeReader(self, answer, stop - start)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
        encoded = None if body is None else json.dumps(body).encode()
        answer = self._send(method, path, encoded, {}, deadline, 0.0)
        if answer.status != http.client.OK:
            self._fail(answer)
        try:
            content = json.loads(answer.read(_MAX_ANSWER_BYTES))
            answer.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise errors.Unavailable(f"{self.name}: {error}") from error
        if not isinstance(content, dict):
            raise errors.Unavailable(f"{self.name}: {path} answered {content!r}")
        return content

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        deadline: Deadline,
        extra_s: float,
    ) -> http.client.HTTPResponse:
        deadline.check(self.name)
        self.limit(deadline, extra_s)
        for attempt in (1, 2):
            reused = self._http.sock is not None
            try:
                self._http.request(method, path, body=body, headers={**self._headers, **headers})
                return self._http.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # a kept connection that the relay closed meanwhile: once more on a new one (all calls are idempotent)
                if attempt == 1 and reused and not isinstance(error, TimeoutError):
                    continue
                raise errors.Unavailable(f"{self.name}: {error or type(error).__name__}") from error
        raise AssertionError("unreachable")

    def limit(self, deadline: Deadline, extra_s: float = 0.0) -> None:
        """Let the next socket call wait no longer than the deadline, nor than the read timeout and ``extra_s``."""
        limit = max(0.001, min(self._timeout_s + extra_s, deadline.remaining()))
        self._http.timeout = limit
        if self._http.sock is not None:
            self._http.sock.settimeout(limit)

    def _fail(self, answer: http.client.HTTPResponse) -> None:
        """Raise the error that the relay answered with."""
        try:
            content = json.loads(answer.read(_MAX_ANSWER_BYTES))
            kind, message = str(content["error"]), str(content["message"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            kind, message = "Unavailable", f"status {answer.status}"
        finally:
            self.close()
        known = {"ConfigError": errors.ConfigError, "Fenced": errors.Fenced, "WeightsMismatch": errors.WeightsMismatch}
        raise known.get(kind, errors.Unavailable)(f"{self.name}: {message}")


class RangeReader:
    """The body of a range answer."""

    def __init__(self, client: RelayClient, answer: http.client.HTTPResponse, size: int) -> None:
        self._client = client
        self._answer = answer
        self._left = size

    def read_into(self, target: memoryview, timeout_s: float) -> None:
        """Fill ``target`` with the next bytes. Raises Unavailable when they do not come; the range is over then."""
        limit = Deadline.after(timeout_s, f"{self._client.name}: read of a chunk")
        filled = 0
        try:
            while filled < len(target):
                limit.check()
                self._client.limit(limit, timeout_s)
                with target[filled:] as rest:
                    count = self._answer.fp.readinto1(rest)
                if not count:
                    raise errors.Unavailable(f"{self._client.name}: the answer ended {self._left - filled} bytes early")
                filled += count
        except (OSError, http.client.HTTPException) as error:
            self.abandon()
            raise errors.Unavailable(f"{self._client.name}: {error or type(error).__name__}") from error
        except errors.Retryable as error:
            self.abandon()
            raise errors.Unavailable(str(error)) from error
        self._left -= filled
        if not self._left:
            self._answer.close()

    def abandon(self) -> None:
        """Drop the rest of the range, and with it the connection."""
        self._answer.close()
        self._client.close()
