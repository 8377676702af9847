"""The rollout as the runner makes it from a run file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from laminar.operators.registry import build, config_class
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.operator import Rollout
from tests.unit.operators.rollout.stage import Stage


def test_the_registry_builds_a_rollout_with_the_engine_of_its_config(stage: Stage, tmp_path: Path) -> None:
    config = config_class("rollout")(engine={"kind": "scripted", "max_running": 3})  # type: ignore[call-arg]
    context = stage.world.context("rollout")
    context = replace(context, run=replace(context.run, run_dir=tmp_path))
    operator = build(config, context)
    try:
        assert isinstance(operator, Rollout)
        operator.step(stage.world.now)
        assert (stage.status().max_running, stage.status().state) == (3, "starting")
    finally:
        operator.close()


def test_c10_every_pacing_constant_is_configured_and_the_number_in_flight_is_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="laminar.operators.rollout.operator"):
        stage.rollout(max_in_flight=37)
        stage.rollout()
    messages = [record.getMessage() for record in caplog.records]
    assert any("at most 37 trajectories in flight" in message for message in messages)
    assert any("at most 8 trajectories in flight" in message for message in messages)
    assert {
        "max_in_flight",
        "top_up_lag",
        "delta_s",
        "delta_tokens",
        "heartbeat_s",
    } <= RolloutConfig.model_fields.keys()


def test_every_setting_is_described_and_unknown_ones_are_refused() -> None:
    assert all(field.description for name, field in RolloutConfig.model_fields.items() if name != "kind")
    with pytest.raises(ValidationError, match="max_in_fligth"):
        RolloutConfig(max_in_fligth=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="vllm-next"):
        RolloutConfig(engine={"kind": "vllm-next"})  # type: ignore[arg-type]
