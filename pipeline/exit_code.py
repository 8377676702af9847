"""What a process's exit code says, by sysexits(3).

>>> exit_code_of(ConfigError("steps: missing"))
78
"""

from __future__ import annotations

from laminar.schemas.errors import ConfigError, Fenced, LaminarError, Retryable

__all__ = [
    "CRASHED",
    "DO_NOT_RETRY",
    "FATAL",
    "FENCED",
    "FINISHED",
    "RETRYABLE",
    "USAGE",
    "WRONG_CONFIG",
    "exit_code_of",
]

FINISHED = 0
CRASHED = 1
"""An exception that is no LaminarError: a bug. Trying again may help."""
USAGE = 2
"""The command line or the configuration is wrong (as typed by a person)."""
FATAL = 70
"""EX_SOFTWARE: trying again cannot help."""
RETRYABLE = 75
"""EX_TEMPFAIL: trying again may help."""
FENCED = 76
"""EX_PROTOCOL: another process took this one's identity, or the broker gave up its open transaction while it stalled.
Whoever is sure that the other process is not wanted, or is this one, starts it again."""
WRONG_CONFIG = 78
"""EX_CONFIG: an operator refuses its configuration."""

DO_NOT_RETRY = frozenset({USAGE, FATAL, WRONG_CONFIG})
"""A supervisor that sees one of these stops the run."""


def exit_code_of(error: LaminarError) -> int:
    """The code with which an operator's process ends on this error."""
    if isinstance(error, ConfigError):
        return WRONG_CONFIG
    if isinstance(error, Fenced):
        return FENCED
    return RETRYABLE if isinstance(error, Retryable) else FATAL
