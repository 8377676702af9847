"""Which tokens the probes are, and that their numbers are those of the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.operators.trainer.probes import Probing
from laminar.pipeline.examples.tokenizer import symbol_tokenizer

CPU = torch.device("cpu")


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 49,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**shape, **changes})).eval()


def test_the_numbers_are_the_models_at_temperature_1() -> None:
    made = model()
    first, second = Probing(made).ask(made, device=CPU, autocast=False)
    assert (first.lengths_P.tolist(), second.lengths_P.tolist()) == ([8, 17, 33, 40, 48], [5, 12, 20])
    for probe in (first, second):
        assert len(probe.tokens_L) == probe.lengths_P[-1]
        assert probe.dtype == "float32"
        for row, length in enumerate(probe.lengths_P):
            with torch.no_grad():
                logits = made(input_ids=torch.tensor([probe.tokens_L[:length].tolist()])).logits[0, -1]
            expected, ids = torch.log_softmax(logits, dim=-1).topk(32)
            assert np.abs(expected.numpy() - probe.logprobs_PK[row]).max() < 1e-5
            assert set(ids.tolist()) == set(probe.ids_PK[row].tolist())


def test_the_tokens_are_the_same_for_each_version_and_for_each_start() -> None:
    made = model()
    probing = Probing(made)
    before = probing.ask(made, device=CPU, autocast=False)
    with torch.no_grad():
        made.lm_head.weight.mul_(1.5)
    after = probing.ask(made, device=CPU, autocast=False)
    assert [p.tokens for p in before] == [p.tokens for p in after]
    assert [p.logprobs for p in before] != [p.logprobs for p in after]
    assert Probing(model()).ask(model(), device=CPU, autocast=False) == before


def test_tokens_that_mean_something_are_left_out(tmp_path: Path) -> None:
    made = model()
    used = set(np.concatenate([p.tokens_L for p in Probing(made).ask(made, device=CPU, autocast=False)]).tolist())
    assert not used & {0, 1, 49}
    assert used & {2, 3}
    tokenizer = symbol_tokenizer(list("abcdefghij"), separator="", max_length=64)  # ids 4 to 13, below them specials
    tokenizer.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    used = set(np.concatenate([p.tokens_L for p in Probing(loaded).ask(loaded, device=CPU, autocast=False)]).tolist())
    assert used == set(range(4, 14))


def test_a_short_model_and_a_small_vocabulary_have_less() -> None:
    made = model(max_position_embeddings=18, vocab_size=10, eos_token_id=2)
    first, second = Probing(made).ask(made, device=CPU, autocast=False)
    assert (first.lengths_P.tolist(), second.lengths_P.tolist()) == ([8, 17], [5, 12])
    assert (first.top_k, first.ids_PK.shape) == (10, (2, 10))
    tiny = model(max_position_embeddings=4)
    assert Probing(tiny).ask(tiny, device=CPU, autocast=False) == ()


def test_a_model_without_finite_logprobs_gives_none_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    probing = Probing(made)
    with torch.no_grad():
        made.lm_head.weight[3] = float("nan")
    with caplog.at_level(logging.WARNING):
        assert probing.ask(made, device=CPU, autocast=False) == ()
    assert "not all finite" in caplog.text


def test_under_autocast_the_probes_say_bfloat16() -> None:
    made = model()
    assert {p.dtype for p in Probing(made).ask(made, device=CPU, autocast=True)} == {"bfloat16"}
