from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from laminar.pipeline.full_disk import full_disk
from laminar.schemas.errors import ConfigError


def no_file_grows() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


@pytest.mark.parametrize(("before", "code"), [(None, 78), (no_file_grows, 75)])
def test_a_refusal_is_not_final_while_nothing_can_be_written(
    tmp_path: Path, before: Callable[[], None] | None, code: int
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("name: x\nstepz: 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "laminar.pipeline.process", "trainer", "0", str(config)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=before,
        check=False,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert ("cannot be written" in done.stderr) == (code == 75)
    assert not list(tmp_path.glob(".laminar-*"))


def test_a_cause_that_names_a_full_disk_is_found_however_deep(tmp_path: Path) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "model.lock")
        except OSError as error:
            raise ValueError("cannot load") from error
    except ValueError:
        try:
            raise ConfigError("model.path: cannot load")
        except ConfigError as error:
            found = error
    assert full_disk(found, [tmp_path]) == "model.lock cannot be written: No space left on device"
    assert full_disk(ConfigError("steps: missing"), [tmp_path, tmp_path / "missing"]) is None
