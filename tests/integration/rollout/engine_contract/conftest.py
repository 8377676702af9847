"""Every engine that must pass the suite: add a factory to ``FACTORIES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import pytest

from tests.integration.rollout.engine_contract.subject import MakeSubject, Subject

FACTORIES = {
    "scripted": "tests.integration.rollout.engine_contract.scripted_subject:make",
    "torch": "tests.integration.rollout.engine_contract.torch_subject:make",
    "vllm": "tests.integration.rollout.engine_contract.vllm_subject:make",
    "scripted-process": "tests.integration.rollout.engine_contract.process_subject:scripted",
    "torch-process": "tests.integration.rollout.engine_contract.process_subject:torch",
    "vllm-process": "tests.integration.rollout.engine_contract.process_subject:vllm",
}
"""Engine -> ``module:function``, a MakeSubject. ``-process``: in a process of its own."""

NEEDS = {"vllm": "vLLM is not installed in this environment (`make test-vllm` makes one with it)"}
"""Module -> why engines of its name are passed over where there is none."""


@pytest.fixture(params=sorted(FACTORIES))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Subject]]:
    """Makes subjects of one engine, loaded with version 0; closes them."""
    needed = request.param.removesuffix("-process")
    if needed in NEEDS and find_spec(needed) is None:
        pytest.skip(NEEDS[needed])
    module, _, function = FACTORIES[request.param].partition(":")
    factory = cast("MakeSubject", getattr(import_module(module), function))
    made: list[Subject] = []

    def loaded(**limits: int) -> Subject:
        subject = factory(**limits)
        made.append(subject)
        subject.engine.load(subject.weights(0), 0)
        return subject

    yield loaded
    for subject in made:
        subject.done()
