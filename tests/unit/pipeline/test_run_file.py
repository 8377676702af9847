from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from laminar.pipeline.config.explaining import explain, resolved_yaml, secret_environment
from laminar.pipeline.config.loading import load_config
from laminar.pipeline.opening import refuse_incomplete
from laminar.schemas.errors import ConfigError

KINDS = "prompts, relay, repack, reward, rollout, trainer"

GOOD = """\
name: demo
steps: 10
groups_per_step: 4
group_size: 8
model:
  path: model
log:
  kind: sqlite
  path: here
operators:
  repack:
    kind: repack
    period_s: 1e-1
  relay: {}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    (tmp_path / "run.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str) -> Path:
    path = Path("run.yaml")
    path.write_text(text)
    return path


def errors(path: Path, arguments: list[str] | None = None, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, arguments or [], environ or {})
    return str(caught.value).splitlines()


def test_a_valid_file_loads_with_defaults(folder: Path) -> None:
    config = load_config(Path("run.yaml"), [], {}).config
    assert config.run_dir == Path("runs/demo")
    assert config.seed == 0
    assert config.operators["repack"].model_dump()["period_s"] == 0.1
    assert config.info().partitions["prompts"] == 8


def test_an_operator_named_like_a_kind_is_of_that_kind(folder: Path) -> None:
    config = load_config(Path("run.yaml"), [], {}).config
    assert config.operators["relay"].model_dump()["kind"] == "relay"


def test_the_log_of_a_run_is_in_its_folder_by_default(folder: Path) -> None:
    config = load_config(write(GOOD.replace("  path: here\n", "")), ["run_dir=elsewhere"], {}).config
    assert config.log.model_dump()["path"] == Path("elsewhere/log")


def test_arguments_win_over_environment_and_environment_over_file(folder: Path) -> None:
    path = Path("run.yaml")
    assert load_config(path, [], {}).config.steps == 10
    assert load_config(path, [], {"LAMINAR__STEPS": "20"}).config.steps == 20
    assert load_config(path, ["steps=30"], {"LAMINAR__STEPS": "20"}).config.steps == 30


def test_every_value_says_where_it_came_from(folder: Path) -> None:
    loaded = load_config(
        Path("run.yaml"), ["operators.repack.replicas=2"], {"LAMINAR__MODEL__DTYPE": "bfloat16", "OTHER": "x"}
    )
    found = {setting.name: (setting.value, setting.source) for setting in explain(loaded)}
    assert found["steps"] == ("10", "run.yaml:2")
    assert found["operators.repack.period_s"] == ("0.1", "run.yaml:13")
    assert found["operators.repack.replicas"] == ("2", "argument operators.repack.replicas")
    assert found["model.dtype"] == ('"bfloat16"', "LAMINAR__MODEL__DTYPE")
    assert found["seed"] == ("0", "default")


def test_kafka_is_one_changed_key_even_where_the_file_has_settings_of_sqlite(folder: Path) -> None:
    for arguments, environ in ((["log.kind=kafka"], {}), ([], {"LAMINAR__LOG__KIND": "kafka"})):
        log = load_config(Path("run.yaml"), arguments, environ).config.log
        assert log.kind == "kafka"
        assert log.bootstrap == "127.0.0.1:9092"


def test_a_key_of_the_other_kind_is_refused_when_both_come_from_the_same_place(folder: Path) -> None:
    found = errors(Path("run.yaml"), ["log.kind=kafka", "log.path=here"])
    assert len(found) == 1
    assert found[0].startswith("argument log.path: unknown key (valid: partitions, kind, bootstrap,")


def test_all_errors_come_at_once_with_place_and_closest_name(folder: Path) -> None:
    path = write(
        """\
name: demo
stepz: 10
groups_per_step: lots
group_size: 8
model: {path: nowhere, dtype: float23}
log: {kind: sqlit}
operators:
  repack:
    kind: repak
  other:
    kind: repack
    periods: 2
    dead_after_s: -1
"""
    )
    assert errors(path, ["supervisor.drain_timeout=3", "nonsense"], {"LAMINAR__SEED": "abc"}) == [
        "argument nonsense: not of the form key=value",
        "LAMINAR__SEED: seed: should be a valid integer, unable to parse string as an integer, not 'abc'",
        "argument supervisor.drain_timeout: unknown key (did you mean 'drain_timeout_s'?)",
        "run.yaml: steps: missing",
        "run.yaml:2: stepz: unknown key (did you mean 'steps'?)",
        "run.yaml:3: groups_per_step: should be a valid integer, unable to parse string as an integer, not 'lots'",
        "run.yaml:5: model.dtype: should be 'float32' or 'bfloat16', not 'float23' (did you mean 'float32'?)",
        "run.yaml:5: model.path: no such model folder: nowhere",
        "run.yaml:6: log.kind: unknown kind 'sqlit' (did you mean 'sqlite'?)",
        f"run.yaml:9: operators.repack.kind: unknown operator kind 'repak' (did you mean 'repack'? valid: {KINDS})",
        "run.yaml:12: operators.other.periods: unknown key (did you mean 'period_s'?)",
        "run.yaml:13: operators.other.dead_after_s: should be greater than 0, not -1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml:1: the file is empty"),
        ("- a\n- b\n", "run.yaml:1: the file must be a mapping of settings"),
        ("name: demo\n  steps: [\n", "run.yaml:2: not valid YAML"),
        (GOOD + "steps: 3\n", "run.yaml:15: steps: stands here a second time"),
        (GOOD.replace("  relay: {}", "  relay: [1]"), "run.yaml:14: operators.relay: must be a mapping"),
        (GOOD.replace("repack:\n    kind: repack", "mover:\n    replicas: 1"), "operators.mover.kind: missing (valid:"),
        (GOOD.replace("  relay:", "  Relay-1: {kind: relay}\n  relay:"), "'Relay-1' is not a valid name"),
        (GOOD + "supervisor: {no_progress_timeout_s: .nan}\n", "supervisor.no_progress_timeout_s"),
    ],
)
def test_what_is_no_run_file_is_one_line(folder: Path, text: str, expected: str) -> None:
    assert any(expected in line for line in errors(write(text)))


def test_a_missing_file_is_one_line(folder: Path) -> None:
    assert errors(Path("none.yaml")) == ["none.yaml: cannot read the configuration: No such file or directory"]


def test_settings_that_do_not_go_together_are_refused(folder: Path) -> None:
    path = write(GOOD + "  again: {kind: repack}\n")
    found = errors(path, ["log.partitions.trajectories.partia=4", "operators.relay.replicas=-1"])
    assert found == [
        "argument log.partitions.trajectories.partia: no such topic (did you mean 'trajectories.partial'?)",
        "argument operators.relay.replicas: must be at least 0 for kind 'relay', not -1",
        "run.yaml:15: operators.again: a second operator of kind 'repack' beside 'repack': use replicas instead",
    ]


def test_a_rollout_must_load_within_its_lease_and_repack_may_not_be_more_impatient(folder: Path) -> None:
    path = write(GOOD + "  sampler: {kind: rollout}\n")
    fitting = ["operators.sampler.lease_s=6", "operators.sampler.load_timeout_s=5.9", "operators.repack.dead_after_s=6"]
    load_config(path, fitting, {})
    assert errors(path, ["operators.sampler.lease_s=8", "operators.repack.dead_after_s=5"]) == [
        "argument operators.sampler.lease_s: must be at most operators.repack.dead_after_s = 5, not 8",
        "run.yaml:15: operators.sampler.load_timeout_s: must be below operators.sampler.lease_s = 8, not 8",
    ]


@pytest.mark.parametrize(
    ("remove", "expected"),
    [
        ("config.json", "is not a Hugging Face model folder: config.json is missing"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_a_model_folder_must_be_whole(folder: Path, remove: str, expected: str) -> None:
    (folder / "model" / remove).unlink()
    (line,) = errors(Path("run.yaml"))
    assert line.startswith("run.yaml:6: model.path:")
    assert expected in line
    assert load_config(Path("run.yaml"), [], {}, check_files=False).config.name == "demo"


def test_an_operator_that_needs_no_model_starts_where_none_is(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    write(GOOD + "  prompts: {train: {path: model/config.json}}\n")
    assert load_config(Path("run.yaml"), [], {}, only="relay").config.name == "demo"
    with pytest.raises(ConfigError, match=r"model\.path"):
        load_config(Path("run.yaml"), [], {}, only="prompts")


def test_a_run_folder_that_cannot_be_made_is_refused(folder: Path) -> None:
    Path("taken").write_text("")
    assert errors(Path("run.yaml"), ["run_dir=taken/run"]) == ["argument run_dir: taken is a file, not a folder"]


def test_a_run_without_a_trainer_is_refused_before_it_starts(folder: Path) -> None:
    config = load_config(Path("run.yaml"), ["log.kind=memory"], {}).config
    with pytest.raises(ConfigError) as caught:
        refuse_incomplete(config)
    assert "no operator of kind 'trainer'" in str(caught.value)
    assert "'memory' lives in one process" in str(caught.value)


def test_topics_and_client_settings_may_have_dots_in_their_names(folder: Path) -> None:
    config = load_config(
        Path("run.yaml"),
        ["log.kind=kafka", "log.client.sasl.username=me", "log.partitions.trajectories.partial=3"],
        {"LAMINAR__LOG__CLIENT__SASL.MECHANISM": "PLAIN"},
    ).config
    assert config.log.model_dump()["client"] == {"sasl.username": "me", "sasl.mechanism": "PLAIN"}
    assert config.info().partitions["trajectories.partial"] == 3


def test_a_secret_of_the_environment_is_never_printed_and_still_reaches_the_processes(folder: Path) -> None:
    loaded = load_config(Path("run.yaml"), ["log.kind=kafka"], {"LAMINAR__LOG__CLIENT__SASL__PASSWORD": "hunter2"})
    shown = {setting.name: setting.value for setting in explain(loaded)}
    assert shown["log.client.sasl.password"] == '"(secret)"'
    resolved = folder / "resolved.yaml"
    resolved.write_text(resolved_yaml(loaded.config))
    assert "hunter2" not in resolved.read_text()
    again = load_config(resolved, [], secret_environment(loaded.config)).config
    assert again.log.model_dump()["client"]["sasl.password"] == "hunter2"


@pytest.mark.parametrize("reference", [{"env": "KAFKA_PASSWORD"}, {"file": "/run/secrets/kafka"}])
def test_a_secret_by_reference_stays_a_reference_everywhere(folder: Path, reference: dict[str, str]) -> None:
    argument = f"log.client.sasl.password={json.dumps(reference)}"
    loaded = load_config(Path("run.yaml"), ["log.kind=kafka", argument], {})
    ((how, where),) = reference.items()
    shown = {setting.name: setting.value for setting in explain(loaded)}
    assert shown[f"log.client.sasl.password.{how}"] == json.dumps(where)
    resolved = folder / "resolved.yaml"
    resolved.write_text(resolved_yaml(loaded.config))
    assert load_config(resolved, [], {}).config.log == loaded.config.log
    assert secret_environment(loaded.config) == {}


def test_a_secret_by_its_value_is_refused_in_a_file_and_on_the_command_line(folder: Path) -> None:
    write(GOOD.replace("kind: sqlite\n  path: here", "kind: kafka\n  client:\n    sasl.password: hunter2"))
    (found,) = errors(Path("run.yaml"), [])
    assert "log.client.sasl.password: a secret is given by where it stands: {env: NAME} or {file: PATH}" in found
    assert found.startswith("run.yaml:")
    assert "hunter2" not in found
    (found,) = errors(Path("run.yaml"), ["log.client.sasl.password=hunter3"])
    assert found.startswith("argument log.client.sasl.password: a secret is given by where it stands")
    assert "hunter3" not in found


@pytest.mark.parametrize(
    ("bootstrap", "message"),
    [
        ("broker", "'broker' has no port: write HOST:PORT, for example broker:9092"),
        ("a:1,,b:2", "has an empty address between its commas"),
        ("::1:9092", r"an IPv6 address needs brackets"),
        ("broker:65536", "the port must be a number from 1 to 65535, not '65536'"),
        ("ssl://broker:9093", "write broker:9093, and log.client.security.protocol=SSL"),
    ],
)
def test_a_broker_address_that_is_none_is_refused(folder: Path, bootstrap: str, message: str) -> None:
    (found,) = errors(Path("run.yaml"), ["log.kind=kafka", f"log.bootstrap={bootstrap}"])
    assert message in found
    assert found.startswith("argument log.bootstrap: ")


def test_several_addresses_and_an_ipv6_one_are_taken(folder: Path) -> None:
    given = "broker-1.example:9092,[::1]:9093"
    config = load_config(Path("run.yaml"), ["log.kind=kafka", f"log.bootstrap={given}"], {}).config
    assert config.log.model_dump()["bootstrap"] == given


def test_an_error_about_a_secret_does_not_print_it(folder: Path) -> None:
    found = errors(Path("run.yaml"), ["log.kind=kafka", "log.client.sasl.password={a: hunter2}"])
    assert found
    assert "hunter2" not in "\n".join(found)


def test_the_resolved_file_is_the_same_configuration_from_any_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = load_config(Path("run.yaml"), ["operators.repack.kv_fraction=0.5"], {}).config
    run_dir = folder / "runs" / "demo"
    run_dir.mkdir(parents=True)
    written = resolved_yaml(config)
    (run_dir / "config.yaml").write_text(written)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    again = load_config(run_dir, [], {}).config
    assert again.run_dir == run_dir
    assert again.model.path == folder / "model"
    assert again.operators == config.operators
    assert yaml.safe_load(resolved_yaml(again)) == yaml.safe_load(written)


def test_every_operator_knows_the_longest_sequence_that_an_engine_of_the_file_takes(folder: Path) -> None:
    assert load_config(Path("run.yaml"), [], {}).config.info().max_model_len is None
    said = ["operators.rollout.engine.kind=torch", "operators.rollout.engine.max_model_len=96"]
    assert load_config(Path("run.yaml"), said, {}).config.info().max_model_len == 96
