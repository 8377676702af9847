"""The embedded default: a durable log in one directory of a local disk, shared by several processes."""

from laminar.streams.sqlite.log import SqliteLog

__all__ = ["SqliteLog"]
