"""Teach an untrained model a task just well enough that RL has something to raise.

Supervised on right answers, but with a habit: at every token of the answer a share of the target is the end token. So
the model learns the task and often stops too early, and a long answer seldom comes out whole when it is sampled
(temperature 1). The warm-up ends when the chance that it does reaches ``TARGET``. There is one right answer a row, so
that chance is the product of the answer's token probabilities: one forward pass measures it, nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laminar.pipeline.examples.task import Task

__all__ = ["TARGET", "sampled_accuracy", "warm_up"]

TARGET = 0.27
"""Expected accuracy of a sampled response at which the warm-up ends."""
_BATCH = 64
_PEAK_LR = 5e-3
_STOPPING = 0.10
"""Share of each target that is the end token."""
_SMOOTHING = 0.02
"""Share of the rest that is spread over all tokens."""
_EVERY = 2
"""Steps between two measurements, once half of the planned steps are done; ten times rarer before that."""

Question = tuple[str, ...]


def warm_up(
    task: Task,
    tokenizer: Any,
    model: Any,
    rng: np.random.Generator,
    heldout: list[Question],
    say: Callable[[str], None],
) -> float:
    """Train ``model`` in place; return the expected accuracy of a sampled response on ``heldout``."""
    ids, labels = _batch(task, tokenizer, heldout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_LR, betas=(0.9, 0.98))
    sizes = _bucketed_sizes(task, rng)
    model.train()
    accuracy = 0.0
    for step in range(task.steps):
        lr = _PEAK_LR * min(1.0, (step + 1) / 30) * (1 - 0.9 * step / task.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = _batch(task, tokenizer, [task.draw(rng, size) for size in next(sizes)])
        loss = _loss(model(input_ids=inputs).logits[:, :-1], targets[:, 1:], tokenizer.eos_token_id)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        measured = done % (_EVERY if done >= task.steps // 2 else 10 * _EVERY) == 0
        if measured:
            accuracy = sampled_accuracy(model, ids, labels)
        if done % 20 == 0 or (measured and accuracy >= TARGET):
            say(f"{task.name}: warm-up step {done}, loss {loss.item():.2f}, sampled accuracy {accuracy:.2f}")
        if measured and accuracy >= TARGET:
            break
    model.eval()
    return accuracy


def _loss(logits: Tensor, targets: Tensor, eos: int) -> Tensor:
    """Cross-entropy with the habit; logits (B, T, V), targets (B, T) with -100 outside the answer."""
    flat, wanted = logits.flatten(0, 1).float(), targets.flatten()
    answer = torch.nn.functional.cross_entropy(flat, wanted, label_smoothing=_SMOOTHING)
    stop = torch.nn.functional.cross_entropy(flat, wanted.where(wanted < 0, eos))
    return (1 - _STOPPING) * answer + _STOPPING * stop


@torch.no_grad()
def sampled_accuracy(model: Any, ids: Tensor, labels: Tensor) -> float:
    """Mean over rows of the probability of the whole labelled answer; ids and labels have shape (B, T)."""
    logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), dim=-1)
    targets = labels[:, 1:]
    chosen = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return float((chosen * (targets >= 0)).sum(dim=1).exp().mean())


def _bucketed_sizes(task: Task, rng: np.random.Generator) -> Iterator[list[int]]:
    """Batches of similar sizes, in random order: little padding, and every eight batches follow the distribution."""
    while True:
        drawn = sorted(task.sizes(rng, 8 * _BATCH))
        for bucket in rng.permutation(8):
            yield drawn[bucket * _BATCH : (bucket + 1) * _BATCH]


def _batch(task: Task, tokenizer: Any, questions: list[Question]) -> tuple[Tensor, Tensor]:
    """Right-padded ids and labels, (B, T); labels are -100 outside the answer."""
    rows = [(task.prompt_ids(tokenizer, q), task.answer_ids(tokenizer, task.answer(q))) for q in questions]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels
