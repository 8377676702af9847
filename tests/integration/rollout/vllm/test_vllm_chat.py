"""Chats through the real operators on vLLM: what is trained on is what was sampled, byte for byte."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from laminar.operators.operator import Operator
from laminar.operators.prompts.config import DataConfig, PromptsConfig, SamplingConfig
from laminar.operators.prompts.operator import build as build_prompts
from laminar.operators.reward.config import RewardConfig
from laminar.operators.reward.operator import build as build_reward
from laminar.operators.rollout.config import RolloutConfig
from laminar.operators.rollout.engine import Delta
from laminar.operators.rollout.operator import Rollout
from laminar.operators.trainer.batch import Arrival, Assembly, fold, take
from laminar.operators.trainer.config import AlgorithmConfig
from laminar.operators.trainer.packing import rows
from laminar.operators.trainer.selection import Sample, select
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens
from laminar.streams.deadline import Deadline
from laminar.streams.log import TopicPartition
from tests.integration.rollout.vllm.conftest import LETTERS, SHAPE, views
from tests.support.dataflow import World
from tests.support.weights import NoWeights

if TYPE_CHECKING:
    from laminar.operators.rollout.engines.vllm import VllmEngine

PAIRS = ["ab", "ba", "er", "th"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Held(NoWeights):
    """One version, in memory."""

    def __init__(self, weights: Mapping[str, TensorView]) -> None:
        self._weights = weights

    @contextmanager
    def open(self, manifest: r.VersionManifest, deadline: Deadline) -> Iterator[Mapping[str, TensorView]]:
        yield self._weights


def _write_folder(folder: Path) -> Any:
    """A tokenizer whose text is cut into letters only, over a model that also says pairs and special tokens."""
    tokenizer = symbol_tokenizer(
        [*LETTERS, *PAIRS],
        separator="",
        more_specials=["<|user|>", "<|assistant|>"],
        add_bos=True,
        chat_template=TEMPLATE,
        max_length=512,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "vocab_size": len(tokenizer)}, tie_word_embeddings=True)).eval()
    model.save_pretrained(folder)
    return model


def _recording() -> type[VllmEngine]:
    from laminar.operators.rollout.engines.vllm import VllmEngine

    class Recording(VllmEngine):
        """Notes what the real engine returned."""

        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            self.noted: dict[str, list[Tokens]] = defaultdict(list)

        def poll(self, timeout_s: float) -> list[Delta]:
            deltas = super().poll(timeout_s)
            for delta in deltas:
                self.noted[delta.trajectory_id].append(delta.tokens)
            return deltas

    return Recording


def _samples(world: World) -> list[Sample]:
    """What the trainer makes a step of, from what stands on its topic."""
    state = Assembly()
    for offset, scored in enumerate(world.read("trajectories.scored", r.ScoredTrajectory)):
        source = TopicPartition("trajectories.scored", 0)
        arrival = Arrival(scored=scored, source=source, offset=offset, value=b"")
        state = fold(state, arrival, group_size=world.group_size)
    groups, _ = take(state, world.groups_per_step)
    config = AlgorithmConfig(zero_advantage="keep")
    return list(select(groups, version=0, max_staleness=None, config=config).samples)


def test_e1_trained_ids_are_the_sampled_ids_byte_for_byte_where_text_would_lose_them(
    start: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    model = _write_folder(tmp_path)
    chats = [[{"role": "user", "content": text}] for text in ("abba", "other", "the", "q")]
    lines = [json.dumps({"messages": chat, "answer": "ab"}) for chat in chats]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    engine: Any = start(_recording(), path=tmp_path, eos_token_ids=None)
    world = World(groups_per_step=4, group_size=4)
    source = Held(views(model))
    manifest = source.stage(
        (), tied={}, epoch=1, version=0, parent=-1, step=0, deadline=Deadline.after(60, "the only version")
    )
    world.write(source.seal(manifest, Deadline.after(60, "the only version")))
    data = DataConfig(path=tmp_path / "train.jsonl")
    sampling = SamplingConfig(max_tokens=40)
    operators: list[Operator] = [
        build_prompts(PromptsConfig(train=data, sampling=sampling, epochs=1), world.context("prompts", tmp_path)),
        Rollout(RolloutConfig(), world.context("rollout", tmp_path), engine=engine, weights=source),
        build_reward(RewardConfig(), world.context("reward", tmp_path)),
    ]
    deadline = Deadline.after(120, "16 scored trajectories")
    while len(_samples(world)) < 16:
        deadline.check("not all are scored")
        for _ in range(20):
            for operator in operators:
                operator.step(world.now)
            world.advance(0.05)
    samples = _samples(world)
    for operator in operators:
        operator.close()

    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    batch = rows(samples)
    lost = 0
    for row, sample in enumerate(samples):
        made = sample.trajectory
        sampled = Tokens.concat(engine.noted[made.trajectory_id])
        assert (made.response.ids, made.response.logprobs) == (sampled.ids, sampled.logprobs)
        begin, n = made.prompt.n_prompt_tokens, sampled.n_tokens
        assert batch.input_ids_BL[row, begin : begin + n].astype("<i4").tobytes() == sampled.ids
        assert batch.targets_BT[row, :n].astype("<i4").tobytes() == sampled.ids
        assert batch.sampler_BT[row, :n].astype("<f4").tobytes() == sampled.logprobs
        assert batch.mask_BT[row].sum() == n
        chat = json.loads(made.prompt.messages or "")
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert batch.input_ids_BL[row, :begin].tolist() == list(expected)
        lost += tokenizer(made.text, add_special_tokens=False).input_ids != sampled.ids_T.tolist()
    assert lost > 8, "the text of most responses must not lead back to their tokens, or this shows nothing"
    assert np.ptp([sample.trajectory.response.n_tokens for sample in samples]) > 0
