"""Whether an error may come from a disk that is full, whatever it says of itself.

A library that cannot write its temporary file, its lock or its progress bar raises errors of many kinds, and what
reads like a wrong setting is none. So before such an error is believed, its causes are looked through, and a byte is
written into each folder that matters.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["full_disk"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def full_disk(error: BaseException, folders: Sequence[Path]) -> str | None:
    """What cannot be written, as one clause; None: the error stands."""
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return f"{cause.filename or 'a file'} cannot be written: {cause.strerror}"
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as cause:
        return f"temporary files cannot be written: {cause.strerror}"
    for folder in (*folders, temporary):
        reason = _refusal(folder)
        if reason is not None:
            return f"{folder} cannot be written: {reason}"
    return None


def _refusal(folder: Path) -> str | None:
    try:
        fd, name = tempfile.mkstemp(prefix=".laminar-", dir=folder)
    except OSError as error:
        return error.strerror if error.errno in _FULL else None
    try:
        os.write(fd, b"\0")
        os.fsync(fd)
    except OSError as error:
        return error.strerror if error.errno in _FULL else None
    finally:
        os.close(fd)
        os.unlink(name)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
