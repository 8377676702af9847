"""What only the SQLite log has: files, locks, another run's directory."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from laminar.schemas.errors import ConfigError, DeadlineExceeded, Fatal, Retryable, TopicMismatch, Unavailable
from laminar.streams.log import LogRecord, OutRecord, TopicPartition, TopicSpec
from laminar.streams.sqlite import SqliteLog
from laminar.streams.sqlite.directory import network_file_system

T = TopicPartition("t", 0)
LARGE = 50_000


def opened(path: Path, **options: object) -> SqliteLog:
    log = SqliteLog(path, **options)  # type: ignore[arg-type]
    log.create_topics([TopicSpec(name="t", partitions=1)])
    return log


def write(log: SqliteLog, *values: bytes, timestamp_ms: int | None = None, name: str = "p") -> None:
    with log.producer(name).transaction() as tx:
        for value in values:
            tx.send(OutRecord(topic="t", key=b"k", value=value, timestamp_ms=timestamp_ms))


def read(log: SqliteLog, start: int = 0) -> list[LogRecord]:
    reader = log.reader()
    reader.assign({T: start})
    found = []
    while batch := reader.poll(100, 0.0):
        found += batch
    return found


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").glob("*.segment"))


def test_everything_is_there_after_closing_and_opening(tmp_path: Path) -> None:
    log = opened(tmp_path, owner="run-1")
    write(log, b"small", b"x" * LARGE)
    log.close()
    again = opened(tmp_path, owner="run-1")
    assert [r.value for r in read(again)] == [b"small", b"x" * LARGE]
    again.close()


def test_the_log_of_another_run_is_refused_with_both_names(tmp_path: Path) -> None:
    opened(tmp_path, owner="run-1").close()
    with pytest.raises(TopicMismatch, match=r"belongs to run 'run-1', not to 'run-2'") as caught:
        SqliteLog(tmp_path, owner="run-2")
    assert "\n" not in str(caught.value)
    SqliteLog(tmp_path).close()


def test_a_directory_that_cannot_be_made_is_a_config_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"log directory .*/file/log is not writable: Not a directory") as caught:
        SqliteLog(tmp_path / "file" / "log")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.sqlite").write_bytes(b"something else" * 1000)
    with pytest.raises(Fatal, match=r"log.sqlite: file is not a database"):
        SqliteLog(tmp_path)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/data/run", "nfs4 at /data"),
        ("/data/local/run", None),
        ("/database", None),
        ("/with space/run", "fuse.sshfs at /with space"),
        ("/home/me", None),
    ],
)
def test_a_network_file_system_is_recognised_by_its_longest_mount(path: str, found: str | None) -> None:
    mounts = (
        "/dev/sda1 / ext4 rw 0 0\nserver:/x /data nfs4 rw 0 0\n/dev/sdb /data/local xfs rw 0 0\n"
        "me@host: /with\\040space fuse.sshfs rw 0 0\n"
    )
    assert network_file_system(path, mounts) == found


def test_s15_a_commit_waits_for_other_writers_only_as_long_as_it_may_and_loses_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path)
    producer = log.producer("p")
    other = sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def attempt() -> None:
        with producer.transaction(timeout_s=0.3) as tx:
            tx.send(OutRecord(topic="t", key=b"k", value=b"x" * LARGE))

    with pytest.raises(DeadlineExceeded, match=r"commit of p: not within 0.3 s .*locked by another process"):
        attempt()
    other.execute("COMMIT")
    other.close()
    assert read(log) == []
    attempt()
    assert [len(r.value or b"") for r in read(log)] == [LARGE]
    log.close()


def test_s15_a_transaction_takes_so_many_bytes_and_no_more(tmp_path: Path) -> None:
    log = opened(tmp_path, max_transaction_bytes=1000)
    with pytest.raises(Retryable, match="above 1000 bytes"):
        write(log, b"x" * 600, b"x" * 600)
    assert read(log) == []
    write(log, b"x" * 600)
    write(log, b"x" * 600)
    assert len(read(log)) == 2
    log.close()


def test_a_poll_returns_about_as_many_bytes_as_it_may_and_skips_nothing(tmp_path: Path) -> None:
    log = opened(tmp_path, fetch_bytes=100_000)
    write(log, *(b"%d" % (i % 10) * LARGE for i in range(20)))
    reader = log.reader()
    reader.assign({T: 0})
    batches = []
    while batch := reader.poll(100, 0.0):
        batches.append(batch)
    assert len(batches) > 3
    assert [r.offset for batch in batches for r in batch] == list(range(20))
    log.close()


def test_large_values_lie_in_segment_files_and_damage_is_noticed(tmp_path: Path) -> None:
    log = opened(tmp_path)
    write(log, b"a" * LARGE, b"b" * LARGE)
    (segment,) = segments(tmp_path)
    with segment.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"!")
    with pytest.raises(Fatal, match=r"t\[0\]@0: .* damaged"):
        read(log)
    log.close()


def test_one_transaction_may_write_more_records_than_the_system_takes_pieces_at_once(tmp_path: Path) -> None:
    log = opened(tmp_path)
    values = [f"{i:05d}".encode() * 20 for i in range(3 * os.sysconf("SC_IOV_MAX"))]
    write(log, *values)
    assert [record.value for record in read(log)] == values
    assert len(segments(tmp_path)) == 1
    log.close()


def test_a_segment_that_is_missing_is_an_error_with_its_name_and_the_record(tmp_path: Path) -> None:
    log = opened(tmp_path)
    write(log, b"a" * LARGE)
    (segment,) = segments(tmp_path)
    segment.unlink()
    with pytest.raises(Fatal, match=rf"t\[0\]@0: .*{segment.name} is missing"):
        read(log)
    log.close()


def test_a_failed_commit_leaves_no_bytes_behind_in_the_segment(tmp_path: Path) -> None:
    log = opened(tmp_path)
    write(log, b"a" * LARGE)
    (segment,) = segments(tmp_path)
    size = segment.stat().st_size
    old = log.producer("p")
    log.producer("p")
    with pytest.raises(Fatal, match="replaced"), old.transaction() as tx:
        tx.send(OutRecord(topic="t", key=b"k", value=b"lost" * LARGE))
    write(log, b"b" * LARGE)
    assert [r.value for r in read(log)] == [b"a" * LARGE, b"b" * LARGE]
    log.close()
    SqliteLog(tmp_path).maintain()
    assert segment.stat().st_size == 2 * size


def test_segments_go_when_their_records_and_their_writer_are_gone(tmp_path: Path) -> None:
    writer = SqliteLog(tmp_path)
    writer.create_topics([TopicSpec(name="t", partitions=1, retention_ms=1000)])
    write(writer, b"a" * LARGE, timestamp_ms=5_000)
    other = SqliteLog(tmp_path)
    reader = other.reader()
    reader.assign({T: 0})
    other.maintain(now=5.5)
    assert len(segments(tmp_path)) == 1
    other.maintain(now=100.0)
    assert reader.bounds(T) == (1, 1)
    assert len(segments(tmp_path)) == 1, "its writer lives and may append"
    writer.close()
    (tmp_path / "segments" / "00000000abcd.segment").write_bytes(b"of a process that died before its commit")
    other.maintain(now=100.0)
    assert segments(tmp_path) == []
    other.close()


def test_writers_run_retention_now_and_then(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path, maintain_every_s=0.0)
    log.create_topics([TopicSpec(name="t", partitions=1, retention_ms=3_600_000)])
    write(log, b"old", timestamp_ms=int((time.time() - 7200) * 1000))
    write(log, b"new")
    assert log.reader().bounds(T).start == 1
    log.close()


def test_full_durability_reads_and_writes_the_same(tmp_path: Path) -> None:
    log = opened(tmp_path, durability="full")
    write(log, b"small")
    write(log, b"x" * LARGE)
    assert [len(r.value or b"") for r in read(log)] == [5, LARGE]
    log.close()


def test_a_full_disk_is_retryable_and_the_log_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    write(log, b"a" * LARGE)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(Unavailable, match="No space left on device"):
            write(log, b"b" * LARGE)
    write(log, b"c" * LARGE)
    assert [(r.value or b"")[:1] for r in read(log)] == [b"a", b"c"]
    log.close()


def test_a_topic_that_was_deleted_and_made_again_starts_empty_for_every_handle(tmp_path: Path) -> None:
    log, other = opened(tmp_path), SqliteLog(tmp_path)
    write(other, b"old", name="other")
    log.delete_topic("t")
    log.create_topics([TopicSpec(name="t", partitions=3)])
    assert other.topics()["t"].partitions == 3
    assert other.reader().bounds(T) == (0, 0)
    write(other, b"new", name="other")
    assert sum(log.lag("g", "t").values()) == 1
    log.close()
    other.close()
