"""Two workers in processes of their own: the same tokens as one, the same versions, and none that is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.vllm_worker import Piece, mapped, take
from laminar.operators.trainer.loss import token_logprobs
from laminar.operators.weights import TensorView
from laminar.schemas.errors import Unavailable, WeightsMismatch
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import Tokens
from tests.integration.rollout.engine_contract.subject import Drive
from tests.integration.rollout.vllm.conftest import ARGS, VOCAB, Policy

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

WAIT_S = 60.0
TWO = {**ARGS, "tensor_parallel_size": 2}
PROMPTS = [np.random.default_rng(5).integers(4, VOCAB, n).tolist() for n in (3, 40, 70, 97)]


def _request(name: str, prompt: Sequence[int], *, n: int = 40, temperature: float = 1.0) -> EngineRequest:
    sampling = Sampling(max_tokens=n, temperature=temperature)
    return EngineRequest(trajectory_id=name, prompt_ids=tuple(prompt), sampling=sampling, seed=3)


def _trainer(model: Any, prompt: Sequence[int], response: Tokens) -> np.ndarray:
    ids = [*prompt, *response.ids_T.tolist()]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, len(prompt) - 1 : -1]
    logprobs_BT, _ = token_logprobs(logits, torch.tensor([ids[len(prompt) :]]), torch.tensor([1.0]))
    return logprobs_BT[0].numpy()


@contextmanager
def _in_a_file(weights: Mapping[str, TensorView]) -> Iterator[dict[str, TensorView]]:
    """The weights as a relay's slot has them: in a file without a name, and not at its beginning."""
    fd = os.memfd_create("slot")
    try:
        os.pwrite(fd, b"\xff" * 4096, 0)
        found, at = {}, 4096
        for name, view in weights.items():
            os.pwrite(fd, view.data, at)
            found[name] = replace(view, path=f"/proc/{os.getpid()}/fd/{fd}", offset=at)
            at += -(-view.data.nbytes // 64) * 64
        yield found
    finally:
        os.close(fd)


def _workers(engine: VllmEngine) -> list[int]:
    return [worker.proc.pid for worker in engine._vllm.engine_core.engine_core.model_executor.workers]


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _gone(pids: Iterable[int]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def two(policy: Policy) -> Iterator[VllmEngine]:
    """An engine of two workers; the last test here ends it."""
    from laminar.operators.rollout.engines.vllm import VllmEngine

    made = VllmEngine(
        policy.path, max_running=8, max_model_len=256, kv_total=4096, steps_per_poll=2, eos_token_ids=(), args=TWO
    )
    yield made
    made.close()


def test_two_workers_sample_what_one_does(two: VllmEngine, engine: VllmEngine, policy: Policy) -> None:
    assert len(set(_workers(two)) - {os.getpid()}) == 2
    assert two.limits == engine.limits
    two.load(policy.weights(0), 0)
    names = [f"t/{i}" for i in range(len(PROMPTS))]
    said = []
    for one in (two, engine):
        for name, prompt in zip(names, PROMPTS, strict=True):
            one.submit(_request(name, prompt, temperature=0.0))
        drive = Drive(one)
        drive.until_finished(names)
        said.append(drive)
    for name in names:
        ours, theirs = (drive.tokens(name) for drive in said)
        assert ours.ids == theirs.ids
        assert np.abs(ours.logprobs_T - theirs.logprobs_T).max() < 1e-4
    assert two.stats().kv_used == 0


def test_c4_every_logprob_is_the_trainers_under_the_recorded_version_on_two_workers(
    two: VllmEngine, policy: Policy
) -> None:
    two.load(policy.weights(0), 0)
    prompts = {f"t/{i}": prompt for i, prompt in enumerate(PROMPTS)}
    for name, prompt in prompts.items():
        two.submit(_request(name, prompt))
    drive = Drive(two)
    for version in range(1, 6):
        drive.poll()
        assert two.stats().running == 4
        with _in_a_file(policy.weights(version)) as weights:
            two.load(weights if version % 2 else policy.weights(version), version)
    drive.until_finished(prompts)
    for name, prompt in prompts.items():
        response = drive.tokens(name)
        assert response.n_tokens == 40
        assert set(response.versions_T.tolist()) == set(range(6))
        for version in range(6):
            here = response.versions_T == version
            expected = _trainer(policy.model(version), prompt, response)
            assert np.abs(expected - response.logprobs_T)[here].max() < 1e-4


def test_d11_two_workers_are_not_told_of_weights_that_are_refused(two: VllmEngine, policy: Policy) -> None:
    two.load(policy.weights(0), 0)
    weights = policy.weights(1)
    del weights["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(WeightsMismatch, match=r"down_proj\.weight missing"):
        two.load(weights, 1)
    two.submit(_request("t", PROMPTS[1]))
    drive = Drive(two)
    drive.until_finished(["t"])
    assert set(drive.tokens("t").versions_T.tolist()) == {0}
    assert np.abs(_trainer(policy.model(0), PROMPTS[1], drive.tokens("t")) - drive.tokens("t").logprobs_T).max() < 1e-4


def test_a_signal_to_the_whole_group_does_not_end_the_workers(two: VllmEngine, policy: Policy) -> None:
    """As Ctrl-C and a service manager send it, while the operator still drains."""
    two.load(policy.weights(0), 0)
    pids = _workers(two)
    two.submit(_request("t", PROMPTS[0], n=100))
    two.poll(0.0)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    drive = Drive(two)
    drive.until_finished(["t"])
    time.sleep(1.0)  # for one that does end
    assert all(_alive(pid) for pid in pids)


def test_a_worker_that_is_killed_takes_the_engine_out_of_service_and_close_leaves_none(
    two: VllmEngine, policy: Policy
) -> None:
    two.load(policy.weights(0), 0)
    pids = _workers(two)
    two.submit(_request("t", PROMPTS[0], n=200))
    two.poll(0.0)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(Unavailable, match="a worker process died"):
        _poll_on(two)
    with pytest.raises(Unavailable, match="a worker process died"):
        two.submit(_request("u", PROMPTS[0]))
    two.close()
    assert _gone(pids)


def _poll_on(engine: VllmEngine) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        engine.poll(0.1)


def _breaking(worker: Any, pieces: Sequence[Piece]) -> int:
    """A reload that ends in the middle in one of two workers."""

    def some(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for i, pair in enumerate(tensors):
            if i == 7 and worker.rank == 1:
                raise OSError("the mapping went away")
            yield pair

    with mapped(pieces) as tensors:
        return take(worker, some(tensors))


def _orphanage(folder: str) -> None:
    """A process with an engine of two workers, for the test below: says what it sees on stdout, and hangs."""
    from laminar.operators.rollout.engines.vllm import VllmEngine

    policy = Policy(Path(folder), tied=False, n_kv_heads=2)
    engine = VllmEngine(policy.path, max_running=8, max_model_len=256, kv_total=4096, eos_token_ids=(), args=TWO)
    engine.load(policy.weights(1), 1)
    engine.submit(_request("t", PROMPTS[2]))
    drive = Drive(engine)
    drive.until_finished(["t"])
    tokens = drive.tokens("t")
    said: dict[str, Any] = {
        "workers": _workers(engine),
        "ids": tokens.ids_T.tolist(),
        "logprobs": tokens.logprobs_T.tolist(),
        "errors": [],
        "shared": sorted(path.name for path in Path("/dev/shm").glob("vllm_dist_*")),
    }
    engine._reload = _breaking
    for call in (lambda: engine.load(policy.weights(2), 2), lambda: engine.poll(0.0)):
        try:
            call()
        except Unavailable as error:
            said["errors"].append(str(error))
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    time.sleep(WAIT_S * 5)


def test_workers_end_with_a_parent_that_is_killed_and_one_that_fails_in_a_load_ends_the_service_of_both(
    tmp_path: Path,
) -> None:
    policy = Policy(tmp_path, tied=False, n_kv_heads=2)
    policy.save()
    code = f"from {__name__} import _orphanage; _orphanage({str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        said = json.loads(parent.stdout.readline())
        assert all(_alive(pid) for pid in said["workers"])
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert _gone(said["workers"])
    response = Tokens.build(ids=said["ids"], logprobs=said["logprobs"], version=1)
    assert np.abs(_trainer(policy.model(1), PROMPTS[2], response) - response.logprobs_T).max() < 1e-4
    assert len(said["errors"]) == 2
    assert all("while it loaded version 2: the mapping went away" in error for error in said["errors"])
    assert said["shared"] == []
