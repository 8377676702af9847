"""GRPO in one process with a fixed lag between the policy that samples and the policy that learns.

Everything that decides on learning is the trainer's own: assembly, selection, advantages, micro-batches, loss and
optimizer. Only the sampling is done here, in one static batch.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laminar.operators.operator import ModelConfig
from laminar.operators.trainer.batch import Arrival, Assembly, fold, take
from laminar.operators.trainer.config import TrainerConfig
from laminar.operators.trainer.policy import Policy, load_model
from laminar.operators.trainer.selection import select
from laminar.schemas import records as r
from laminar.schemas.tokens import Tokens, ids_buffer
from laminar.streams.log import TopicPartition

__all__ = ["LaggedLoop"]

_SCORED = TopicPartition("trajectories.scored", 0)


@dataclass(frozen=True)
class _Row:
    text: str
    ids: list[int]
    answer: str


class LaggedLoop:
    """Step k learns from groups that were sampled by version max(0, k - 1 - lag)."""

    def __init__(self, folder: Path, config: TrainerConfig, *, lag: int, steps: int, seed: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
        self._eos: int = self._tokenizer.eos_token_id
        model = load_model(ModelConfig(path=folder / "model"))
        self._sampler = copy.deepcopy(model).eval()
        self._policy = Policy(model, config, total_steps=steps)
        self._model = model
        self._config = config
        self._lag = lag
        self._train = self._rows(folder / "train.jsonl")
        self._heldout = self._rows(folder / "heldout.jsonl")
        self._versions = [self._weights()]
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self.metrics: list[dict[str, float]] = []

    def run(self, steps: int, *, groups: int = 32, group_size: int = 16) -> None:
        """Make optimizer steps."""
        for _ in range(steps):
            self._step(groups, group_size)

    def accuracy(self, samples: int = 4) -> float:
        """Part of right answers of the newest policy on the held-out rows, each sampled ``samples`` times."""
        self._sampler.load_state_dict(self._versions[-1])
        rows = self._heldout * samples
        answers = self._sample(rows)
        return sum(self._reward(row, ids) for row, (ids, _) in zip(rows, answers, strict=True)) / len(answers)

    def _step(self, n_groups: int, group_size: int) -> None:
        version = len(self._versions) - 1
        sampled_by = max(0, version - self._lag)
        self._sampler.load_state_dict(self._versions[sampled_by])
        first = version * n_groups + self._seed * 997
        chosen = [self._train[(first + i) % len(self._train)] for i in range(n_groups)]
        answers = self._sample([row for row in chosen for _ in range(group_size)])
        assembly = Assembly()
        for i, (ids, logprobs) in enumerate(answers):
            index, member = divmod(i, group_size)
            row = chosen[index]
            scored = self._scored(row, first + index, member, group_size, ids, logprobs, sampled_by)
            assembly = fold(
                assembly, Arrival(scored=scored, source=_SCORED, offset=i, value=b""), group_size=group_size
            )
        taken, _ = take(assembly, n_groups)
        batch = select(taken, version=version, max_staleness=None, config=self._config.algorithm)
        self._policy.begin(batch, version + 1)
        while self._policy.advance():
            pass
        learnt = self._policy.finish()
        self.metrics.append({**batch.metrics, **learnt})
        self._versions.append(self._weights())

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def _rows(self, path: Path) -> list[_Row]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [_Row(row["prompt"], self._tokenizer(row["prompt"]).input_ids, row["answer"]) for row in rows]

    def _reward(self, row: _Row, ids: list[int]) -> float:
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return float(ids[-1] == self._eos and text == row.answer)

    def _scored(
        self,
        row: _Row,
        index: int,
        member: int,
        group_size: int,
        ids: list[int],
        logprobs: list[float],
        version: int,
    ) -> r.ScoredTrajectory:
        prompt = r.Prompt(
            prompt_id=f"sortl/0/{index}",
            dataset="sortl",
            epoch=0,
            index=index,
            purpose="train",
            task="sortl",
            group_size=group_size,
            prompt_tokens=ids_buffer(row.ids),
            n_prompt_tokens=len(row.ids),
            prompt_text=row.text,
            reference=row.answer,
            sampling=r.Sampling(max_tokens=32),
            seed=0,
            created_ms=0,
        )
        return r.ScoredTrajectory(
            trajectory=r.CompletedTrajectory(
                trajectory_id=r.trajectory_id(prompt.prompt_id, member),
                group_id=prompt.prompt_id,
                member=member,
                attempt=0,
                prompt=prompt,
                response=Tokens.build(ids=ids, logprobs=logprobs, version=version),
                text="",
                finish="stop" if ids[-1] == self._eos else "length",
                rollout_id="here",
                engine="here",
                seed=0,
                version_min=version,
                version_max=version,
                timings=r.Timings(),
            ),
            reward=self._reward(row, ids),
            function="exact",
            latency_ms=0.0,
            scored_ms=0,
        )

    @torch.no_grad()
    def _sample(self, rows: list[_Row], max_tokens: int = 30) -> list[tuple[list[int], list[float]]]:
        """One response a row, with the logprob of each token, at temperature 1. Left-padded, with a KV cache."""
        from transformers import DynamicCache

        width = max(len(row.ids) for row in rows)
        pad = [width - len(row.ids) for row in rows]
        ids_BL = torch.tensor([[0] * p + row.ids for p, row in zip(pad, rows, strict=True)])
        mask_BL = torch.tensor([[0] * p + [1] * len(row.ids) for p, row in zip(pad, rows, strict=True)])
        position_BL = (mask_BL.cumsum(1) - 1).clamp_min(0)
        cache = DynamicCache(config=self._sampler.config)
        sampled: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        done_B = torch.zeros(len(rows), dtype=torch.bool)
        for _ in range(max_tokens):
            out = self._sampler(
                input_ids=ids_BL,
                attention_mask=mask_BL,
                position_ids=position_BL,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logp_BV = torch.log_softmax(out.logits[:, -1].float(), dim=-1)
            token_B = torch.multinomial(logp_BV.exp(), 1, generator=self._generator)[:, 0]
            sampled.append(token_B)
            logprobs.append(logp_BV.gather(1, token_B[:, None])[:, 0])
            done_B = done_B | (token_B == self._eos)
            if bool(done_B.all()):
                break
            ids_BL = token_B[:, None]
            mask_BL = torch.cat([mask_BL, torch.ones(len(rows), 1, dtype=mask_BL.dtype)], dim=1)
            position_BL = position_BL[:, -1:] + 1
        tokens_BT, logprobs_BT = torch.stack(sampled, 1).tolist(), torch.stack(logprobs, 1).tolist()
        answers: list[tuple[list[int], list[float]]] = []
        for ids, logps in zip(tokens_BT, logprobs_BT, strict=True):
            n = ids.index(self._eos) + 1 if self._eos in ids else len(ids)
            answers.append((ids[:n], logps[:n]))
        return answers
