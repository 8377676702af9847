"""The systemd units: checked by systemd itself where it is installed, and against what the code really does."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from laminar.pipeline import exit_code
from laminar.pipeline.commands.operator import split_instance
from laminar.pipeline.config.models import MonitorConfig, RunnerConfig
from laminar.pipeline.monitor import PATHS

SYSTEMD = Path(__file__).parents[3] / "deploy" / "systemd"
UNIT = SYSTEMD / "laminar-operator@.service"


def settings(unit: Path) -> dict[str, dict[str, list[str]]]:
    """Section -> key -> values, in order."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in unit.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, equals, value = line.partition("=")
            assert equals, line
            assert not value.endswith("\\"), line
            found[section][key].append(value)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_to_object_to(tmp_path: Path) -> None:
    for unit in SYSTEMD.glob("*.service"):
        text = unit.read_text().replace("/opt/laminar/bin/laminar", shutil.which("true") or "/bin/true")
        (tmp_path / unit.name).write_text(text)
    for unit in SYSTEMD.glob("*.target"):
        shutil.copy(unit, tmp_path)
    names = [str(tmp_path / "laminar.target"), str(tmp_path / "laminar-operator@rollout-1.service")]
    shutil.copy(tmp_path / "laminar-operator@.service", names[1])
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, timeout=60, check=False
    )
    said = "\n".join(line for line in done.stderr.splitlines() if str(tmp_path) in line or "laminar" in line)
    assert (done.returncode, said) == (0, "")


def test_the_unit_restarts_by_our_exit_codes() -> None:
    service = settings(UNIT)["Service"]
    prevent = {int(code) for code in service["RestartPreventExitStatus"][0].split()}
    force = {int(code) for code in service["RestartForceExitStatus"][0].split()}
    assert prevent == exit_code.DO_NOT_RETRY
    assert force == {exit_code.RETRYABLE, exit_code.FENCED}
    assert service["Restart"] == ["on-failure"]  # 0: finished, and CRASHED: again
    assert exit_code.FINISHED == 0


def test_the_unit_waits_longer_than_the_drain_deadline_and_signals_the_operator_only() -> None:
    service = settings(UNIT)["Service"]
    assert int(service["TimeoutStopSec"][0]) >= RunnerConfig().drain_timeout_s + 30
    assert service["KillMode"] == ["mixed"]
    assert service["KillSignal"] == ["SIGTERM"]


def test_systemd_waits_for_the_operator_and_its_watchdog_is_slower_than_livez() -> None:
    service = settings(UNIT)["Service"]
    assert service["Type"] == ["notify"]
    assert int(service["WatchdogSec"][0]) > 2 * MonitorConfig().stalled_after_s
    assert int(service["TimeoutStartSec"][0]) >= 600


def test_the_instance_name_is_what_the_command_takes() -> None:
    (command,) = settings(UNIT)["Service"]["ExecStart"]
    assert command.split()[1:] == ["operator", "%i", "/etc/laminar/run.yaml"]
    assert split_instance("rollout-1", None) == ("rollout", 1)


def test_the_unit_gives_no_privileges_and_takes_secrets_from_files() -> None:
    service = settings(UNIT)["Service"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["ProtectSystem"] == ["strict"]
    assert service["CapabilityBoundingSet"] == [""]
    assert service["User"] == ["laminar"]
    assert all(value.startswith("-/etc/laminar/") for value in service["EnvironmentFile"])
    example = (SYSTEMD / "laminar.env.example").read_text()
    assert not re.search(r"^\w*(PASSWORD|TOKEN|SECRET)\w*=.", example, re.MULTILINE)


def test_the_documents_list_every_exit_code_path_and_setting_that_they_name() -> None:
    text = (SYSTEMD.parents[1] / "docs" / "operations.md").read_text()
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    declared = {value for name, value in vars(exit_code).items() if name.isupper() and isinstance(value, int)}
    assert codes == declared
    assert f"RestartPreventExitStatus={settings(UNIT)['Service']['RestartPreventExitStatus'][0]}" in text
    assert set(re.findall(r"^\| `(/\w+)` \|", text, re.MULTILINE)) == set(PATHS) - {"/metrics"}
    for section, model in (("monitor", MonitorConfig), ("runner", RunnerConfig)):
        named = re.findall(rf"`{section}\.(\w+)`(?: \((\d+) s\))?", text)
        assert named
        for name, default in named:
            assert name in model.model_fields, name
            assert not default or float(default) == model.model_fields[name].default, name
