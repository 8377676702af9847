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
}
"""Engine -> ``module:function``, a MakeSubject."""

NEEDS = {"vllm": "vLLM is not installed in this environment (`make test-vllm` makes one with it)"}
"""Engine -> why it is passed over where there is no module of its name."""


@pytest.fixture(params=sorted(FACTORIES))
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Subject]]:
    """Makes subjects of one engine, loaded with version 0; closes them."""
    if request.param in NEEDS and find_spec(request.param) is None:
        pytest.skip(NEEDS[request.param])
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
