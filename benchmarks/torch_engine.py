"""Tokens per CPU-second of the torch engine, beside ``transformers`` ``generate`` on the same prompts.

Both sample at temperature 1 with the logprob of every token, in batches of the same size, on one thread; each request
ends after its own number of tokens, drawn log-normal. ``generate`` decodes a batch until its longest member is done, so
a row that has its tokens goes on for nothing; the engine gives its place to the next one. Only wanted tokens count.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.claim import Claim, quick_from_arguments, report
from laminar.operators.rollout.engine import EngineRequest
from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.pipeline.examples.sortl import TASK
from laminar.schemas.records import Sampling

_BATCH = 64


@dataclass(frozen=True, slots=True)
class _Request:
    prompt_ids: tuple[int, ...]
    n_tokens: int


def main() -> None:
    """Measure, print the table and the claim."""
    quick = quick_from_arguments(__doc__)
    torch.set_num_threads(1)
    bars: Any = logging  # its functions have no annotations
    bars.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tokenizer = TASK.tokenizer()
        torch.manual_seed(0)
        model = TASK.model(tokenizer)
        model.config.max_position_embeddings = 512
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        requests = _requests(tokenizer, 256 if quick else 768)
        rounds = 2 if quick else 3
        engine = TorchEngine(path, max_running=_BATCH, eos_token_ids=(), version=0)
        reference = _reference(path)
        engine_s = min(_engine(engine, requests, round_) for round_ in range(rounds))
        generate_s = min(_generate(reference, requests) for _ in range(rounds))
    wanted = sum(r.n_tokens for r in requests)
    longest = max(r.n_tokens for r in requests)
    report(
        f"{len(requests)} responses, {wanted / len(requests):.0f} tokens each (longest {longest}), batch {_BATCH}",
        ("", "CPU s", "tokens per CPU-second"),
        [("torch engine", engine_s, wanted / engine_s), ("transformers generate", generate_s, wanted / generate_s)],
        [
            Claim(
                name="torch_engine_tokens_per_cpu_s",
                ratio=generate_s / engine_s,
                goal=1.5,
                unit="x",
                lower_is_better=False,
            )
        ],
    )


def _requests(tokenizer: Any, n: int) -> list[_Request]:
    """Prompts of the sortl example; exp(N(3.4, .7)) tokens to sample, 4 to 400."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.round(np.exp(rng.normal(3.4, 0.7, n))), 4, 400).astype(int)
    prompts = [TASK.draw(rng, size) for size in TASK.sizes(rng, n)]
    return [
        _Request(tuple(TASK.prompt_ids(tokenizer, prompt)), int(length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


def _engine(engine: TorchEngine, requests: list[_Request], round_: int) -> float:
    start = time.process_time()
    for i, request in enumerate(requests):
        engine.submit(
            EngineRequest(
                trajectory_id=f"{round_}/{i}",
                prompt_ids=request.prompt_ids,
                sampling=Sampling(max_tokens=request.n_tokens),
                seed=i,
            )
        )
    sampled = 0
    while sampled < sum(r.n_tokens for r in requests):
        sampled += sum(delta.tokens.n_tokens for delta in engine.poll(10.0))
    return time.process_time() - start


def _reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def _generate(model: Any, requests: list[_Request]) -> float:
    """Batch by batch, left-padded, each to the length of its longest member."""
    start = time.process_time()
    for first in range(0, len(requests), _BATCH):
        batch = requests[first : first + _BATCH]
        columns = max(len(r.prompt_ids) for r in batch)
        ids = torch.zeros((len(batch), columns), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            at = columns - len(request.prompt_ids)
            ids[row, at:] = torch.tensor(request.prompt_ids)
            mask[row, at:] = 1
        made = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(r.n_tokens for r in batch),
            output_scores=True,
            return_dict_in_generate=True,
        )
        model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
    return time.process_time() - start


if __name__ == "__main__":
    main()
