"""The torch engine against plain forwards of the same models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from laminar.operators.rollout.engine import Delta, EngineRequest
from laminar.operators.rollout.engines.torch import TorchEngine
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas.errors import ConfigError, InvalidRequest
from laminar.schemas.records import Sampling
from laminar.schemas.tokens import EMPTY, Tokens

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = 4 + len(LETTERS)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 96, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, head_dim=16)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)),
    "mistral with a window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, head_dim=16, sliding_window=5)),
    "gemma3 with windows in some layers": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"})
    ),
    "bloom with alibi": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.3)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=96,
            word_embed_proj_dim=32,
            init_std=0.3,
            pad_token_id=0,
        )
    ),
}


@dataclass(frozen=True)
class Folder:
    path: Path
    model: Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folder]:
    made: dict[str, Folder] = {}

    def make(architecture: str) -> Folder:
        if architecture not in made:
            path = tmp_path_factory.mktemp("model")
            torch.manual_seed(3)
            model = ARCHITECTURES[architecture]().eval()
            model.save_pretrained(path)
            symbol_tokenizer(list(LETTERS), separator="", max_length=96).save_pretrained(path)
            made[architecture] = Folder(path, model)
        return made[architecture]

    return make


def _request(name: str, prompt: Sequence[int], *, sampled: Tokens = EMPTY, seed: int = 1, **how: Any) -> EngineRequest:
    sampling = Sampling(**{"max_tokens": 20, **how})
    return EngineRequest(trajectory_id=name, prompt_ids=tuple(prompt), sampled=sampled, sampling=sampling, seed=seed)


def _run(engine: TorchEngine) -> dict[str, list[Delta]]:
    """Poll until nothing is left."""
    said: dict[str, list[Delta]] = {}
    while engine.stats().running + engine.stats().waiting:
        for delta in engine.poll(10.0):
            said.setdefault(delta.trajectory_id, []).append(delta)
    return said


def _tokens(deltas: Sequence[Delta]) -> Tokens:
    return Tokens.concat(delta.tokens for delta in deltas)


def _plain_logprobs(model: Any, prompt: Sequence[int], response: Tokens, temperature: float = 1.0) -> np.ndarray:
    """Of each response token, from one forward over the whole text, without a cache."""
    ids = torch.tensor([[*prompt, *response.ids_T.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0].float()
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_are_those_of_a_plain_forward_while_rows_enter_and_leave(
    folder: Callable[[str], Folder], architecture: str
) -> None:
    there = folder(architecture)
    engine = TorchEngine(there.path, max_running=4, max_model_len=96, steps_per_poll=3, eos_token_ids=(), version=0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, VOCAB, int(n)).tolist() for n in (3, 11, 5, 7, 2, 9, 4, 30, 6)]
    for i, prompt in enumerate(prompts):
        engine.submit(_request(f"t/{i}", prompt, seed=i, max_tokens=5 + 7 * (i % 4)))
    said = _run(engine)
    for i, prompt in enumerate(prompts):
        response = _tokens(said[f"t/{i}"])
        assert response.n_tokens == 5 + 7 * (i % 4)
        np.testing.assert_allclose(response.logprobs_T, _plain_logprobs(there.model, prompt, response), atol=1e-4)


def test_e3_logprobs_at_temperature_0_6_are_those_of_the_tempered_distribution(
    folder: Callable[[str], Folder],
) -> None:
    there = folder("qwen2")
    engine = TorchEngine(there.path, eos_token_ids=(), version=0)
    for i in range(8):
        engine.submit(_request(f"t/{i}", [5, 9, 12 + i], seed=i, temperature=0.6))
    for i, deltas in enumerate(_run(engine).values()):
        response = _tokens(deltas)
        plain = _plain_logprobs(there.model, [5, 9, 12 + i], response, temperature=0.6)
        np.testing.assert_allclose(response.logprobs_T, plain, atol=1e-4)


def test_a_group_shares_the_reading_of_its_prompt_and_members_differ(folder: Callable[[str], Folder]) -> None:
    there = folder("llama")
    engine = TorchEngine(there.path, eos_token_ids=(), version=0)
    read: list[int] = []
    forward = engine._model.forward

    def counting(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        if ids.shape[1] > 1:
            read.append(len(ids))
        return forward(ids, *rest)

    engine._model.forward = counting  # type: ignore[method-assign]
    for member in range(8):
        engine.submit(_request(f"g/{member}", [7, 8, 9, 10], seed=member))
    said = _run(engine)
    assert read == [1]
    assert len({_tokens(deltas).ids for deltas in said.values()}) > 4
    for deltas in said.values():
        response = _tokens(deltas)
        plain = _plain_logprobs(there.model, [7, 8, 9, 10], response)
        np.testing.assert_allclose(response.logprobs_T, plain, atol=1e-4)


def test_a_sampled_trajectory_resumed_elsewhere_continues_as_if_it_had_not_moved(
    folder: Callable[[str], Folder],
) -> None:
    path = folder("qwen2").path
    first = TorchEngine(path, eos_token_ids=(), version=0)
    first.submit(_request("t/0", [5, 6, 7], seed=77))
    whole = _tokens(_run(first)["t/0"])
    second = TorchEngine(path, eos_token_ids=(), version=0)
    second.submit(_request("other", [9, 9], seed=3))
    second.submit(_request("t/0", [5, 6, 7], seed=77, sampled=whole[:8]))
    assert _tokens(_run(second)["t/0"]).ids == whole[8:].ids


def test_preempted_rows_sample_what_they_would_have_sampled(folder: Callable[[str], Folder]) -> None:
    path = folder("qwen2").path
    roomy = TorchEngine(path, eos_token_ids=(), version=0)
    tight = TorchEngine(path, eos_token_ids=(), version=0, kv_total=60)
    for engine in (roomy, tight):
        for i in range(6):
            engine.submit(_request(f"t/{i}", [5, 6, 7 + i], seed=i))
    expected, got = _run(roomy), _run(tight)
    assert tight.stats().preempted > 0
    assert {name: _tokens(d).ids for name, d in got.items()} == {name: _tokens(d).ids for name, d in expected.items()}


def _views(model: Any) -> dict[str, TensorView]:
    return {
        name: TensorView(dtype="F32", shape=tuple(t.shape), data=memoryview(t.numpy().tobytes()))
        for name, t in model.state_dict().items()
    }


def test_c4_after_a_load_running_rows_continue_as_fresh_ones_under_the_new_weights(
    folder: Callable[[str], Folder],
) -> None:
    there = folder("llama")
    torch.manual_seed(9)
    newer = ARCHITECTURES["llama"]().eval()
    engine = TorchEngine(there.path, eos_token_ids=(), version=0, steps_per_poll=4)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    for i, prompt in enumerate(prompts):
        engine.submit(_request(f"t/{i}", prompt, seed=i))
    before = {delta.trajectory_id: delta.tokens for delta in engine.poll(10.0)}
    engine.load(_views(newer), 5)
    after = _run(engine)
    for i, prompt in enumerate(prompts):
        old, new = before[f"t/{i}"], _tokens(after[f"t/{i}"])
        assert set(old.versions_T.tolist()) == {0}
        assert set(new.versions_T.tolist()) == {5}
        np.testing.assert_allclose(old.logprobs_T, _plain_logprobs(there.model, prompt, old), atol=1e-4)
        fresh = _plain_logprobs(newer, [*prompt, *old.ids_T.tolist()], new)
        np.testing.assert_allclose(new.logprobs_T, fresh, atol=1e-4)


def test_nothing_is_sampled_before_the_first_load(folder: Callable[[str], Folder]) -> None:
    there = folder("llama")
    engine = TorchEngine(there.path)
    engine.submit(_request("t/0", [5]))
    assert engine.poll(0.0) == []
    assert engine.version == -1
    engine.load(_views(there.model), 3)
    assert set(_tokens(_run(engine)["t/0"]).versions_T.tolist()) == {3}


def test_d1_weights_that_are_not_finite_end_in_an_error_and_leave_no_trace(folder: Callable[[str], Folder]) -> None:
    there = folder("qwen2")
    engine = TorchEngine(there.path, eos_token_ids=(), version=0)
    broken = dict(_views(there.model))
    norm = broken["model.norm.weight"]
    broken["model.norm.weight"] = TensorView(
        dtype="F32", shape=norm.shape, data=memoryview(np.full(norm.shape, np.nan, dtype=np.float32).tobytes())
    )
    engine.load(broken, 1)
    engine.submit(_request("t/0", [5, 6]))
    (delta,) = _run(engine)["t/0"]
    assert delta.error is not None
    assert "nan" in delta.error
    assert delta.tokens.n_tokens == 0
    engine.load(_views(there.model), 2)
    engine.submit(_request("t/0", [5, 6]))
    response = _tokens(_run(engine)["t/0"])
    np.testing.assert_allclose(response.logprobs_T, _plain_logprobs(there.model, [5, 6], response), atol=1e-4)


def test_the_folders_end_token_ends_a_response_and_is_not_part_of_its_text(folder: Callable[[str], Folder]) -> None:
    engine = TorchEngine(folder("qwen2").path, version=0)
    for i in range(40):
        engine.submit(_request(f"t/{i}", [5, 6], seed=i, max_tokens=60))
    said = _run(engine)
    stopped = [_tokens(d).ids_T.tolist() for d in said.values() if d[-1].finish == "stop"]
    assert stopped
    for ids in stopped:
        assert ids.index(2) == len(ids) - 1
        assert "<eos>" not in engine.decode(tuple(ids))


def test_a_stop_string_ends_the_response_where_it_is_complete(folder: Callable[[str], Folder]) -> None:
    path = folder("qwen2").path
    engine = TorchEngine(path, eos_token_ids=(), version=0)
    engine.submit(_request("whole", [5, 6], seed=4))
    whole = _tokens(_run(engine)["whole"])
    text = engine.decode(tuple(whole.ids_T.tolist()))
    stop = text[6:8]
    engine.submit(_request("cut", [5, 6], seed=4, stop=(stop, "??")))
    deltas = _run(engine)["cut"]
    cut = _tokens(deltas)
    assert deltas[-1].finish == "stop"
    assert engine.decode(tuple(cut.ids_T.tolist())) == text[: text.index(stop) + 2]


def test_a_response_that_is_already_whole_is_finished_at_once(folder: Callable[[str], Folder]) -> None:
    engine = TorchEngine(folder("qwen2").path, version=0)
    full = Tokens.build(ids=[7] * 20, logprobs=[-1.0] * 20, version=0)
    ended = Tokens.build(ids=[7, 2], logprobs=[-1.0] * 2, version=0)
    engine.submit(_request("full", [5], sampled=full))
    engine.submit(_request("ended", [5], sampled=ended))
    said = _run(engine)
    assert {name: (_tokens(d).n_tokens, d[-1].finish) for name, d in said.items()} == {
        "full": (0, "length"),
        "ended": (0, "stop"),
    }


@pytest.mark.parametrize(
    ("prompt", "how", "words"),
    [
        ([], {}, "0 prompt tokens"),
        ([5] * 96, {}, "max_model_len is 96"),
        ([VOCAB], {}, f"valid: 0 to {VOCAB - 1}"),
        ([5], {"max_tokens": 0}, "max_tokens 0"),
        ([5], {"temperature": float("nan")}, "temperature nan"),
        ([5], {"top_p": 0.0}, "top_p 0.0"),
        ([5], {"top_k": -1}, "top_k -1"),
        ([5], {"min_p": 1.5}, "min_p 1.5"),
        ([5], {"stop": ("",)}, "empty stop string"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_what_would_be_valid(
    folder: Callable[[str], Folder], prompt: list[int], how: dict[str, Any], words: str
) -> None:
    engine = TorchEngine(folder("qwen2").path, version=0)
    with pytest.raises(InvalidRequest, match=words):
        engine.submit(_request("t/0", prompt, **how))
    assert engine.stats().waiting == 0


def test_a_folder_that_is_none_is_one_clear_line(folder: Callable[[str], Folder], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        TorchEngine(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        TorchEngine(tmp_path)
    folder("qwen2").model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer") as failed:
        TorchEngine(tmp_path)
    assert "\n" not in str(failed.value)
    symbol_tokenizer(list(LETTERS), separator="", max_length=96).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded") as failed:
        TorchEngine(tmp_path)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "tpu"}, "engine.device"),
        ({"device": "mps"}, "not supported"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"dtype": "int4"}, "model.dtype"),
        ({"max_running": 0}, "engine.max_running"),
        ({"max_model_len": 97}, "valid: 2 to 96"),
        ({"kv_total": 1}, "engine.kv_total"),
    ],
)
def test_a_wrong_setting_is_named(folder: Callable[[str], Folder], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TorchEngine(folder("qwen2").path, **settings)
