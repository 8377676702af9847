"""The parts of an engine's process that need none: the connection, the silence, the memory, the text."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from laminar.operators.operator import ModelConfig
from laminar.operators.rollout.engines.memory import is_shortage, kv_demand
from laminar.operators.rollout.engines.remote.health import Silence
from laminar.operators.rollout.engines.remote.stream import Stream
from laminar.operators.rollout.engines.remote.weights import mapped, placed
from laminar.operators.rollout.engines.text import load_decoder
from laminar.operators.weights import TensorView
from laminar.pipeline.examples.tokenizer import symbol_tokenizer
from laminar.schemas.errors import ConfigError, Unavailable


def test_a_message_larger_than_the_connection_holds_arrives_whole_and_sending_never_waits() -> None:
    here, there = (Stream(end) for end in socket.socketpair())
    large = bytes(range(256)) * 20000
    here.send(b"first")
    here.send(large)
    here.send(b"last")
    assert here.unsent > 0
    received: list[bytes] = []
    while len(received) < 3:
        received += there.receive()
        here.flush()
    assert received == [b"first", large, b"last"]
    assert here.unsent == 0
    here.close()
    assert (there.receive(), there.closed) == ([], True)
    there.send(b"to nobody")
    there.close()


def test_what_was_sent_before_the_other_end_was_closed_is_received() -> None:
    here, there = (Stream(end) for end in socket.socketpair())
    there.send(b"never read")
    here.send(b"one")
    here.send(b"two")
    here.close()
    there.send(b"too late")
    assert there.receive() == [b"one", b"two"]
    assert there.receive() == []
    assert there.closed
    there.close()


def test_a_wait_ends_when_something_comes() -> None:
    here, there = (Stream(end) for end in socket.socketpair())
    timer = threading.Timer(0.05, here.send, [b"now"])
    timer.start()
    there.wait(60.0)
    assert there.receive() == [b"now"]
    timer.join()
    here.close()
    there.close()


def test_a_silence_counts_what_was_listened_to() -> None:
    silence = Silence(60.0, 0.0)
    assert not silence.lasts(59.0)
    assert not silence.lasts(90.0)  # this machine slept, or we did: at most a quarter of the limit each time
    silence.heard(100.0)
    assert not any(silence.lasts(100.0 + t) for t in range(60))
    assert silence.lasts(160.0)


def test_a_short_limit_counts_quarters_of_it() -> None:
    silence = Silence(1.0, 0.0)
    assert [silence.lasts(10.0 * i) for i in range(1, 5)] == [False, False, False, True]


def test_a_file_that_is_gone_or_too_short_is_named(tmp_path: Path) -> None:
    file = tmp_path / "slot"
    view = TensorView(dtype="U8", shape=(8,), data=memoryview(b"12345678"), path=str(file), offset=0)
    with placed({"a": view}) as table:
        with pytest.raises(Unavailable, match="slot cannot be mapped: No such file"), mapped(table):
            pass
        file.write_bytes(b"1234")
        with pytest.raises(Unavailable, match=r"weights\.a: .*slot ends before byte 8"), mapped(table):
            pass


def test_mapped_weights_cannot_reach_the_file(tmp_path: Path) -> None:
    file = tmp_path / "slot"
    file.write_bytes(b"12345678")
    view = TensorView(dtype="U8", shape=(4,), data=memoryview(b"5678"), path=str(file), offset=4)
    with placed({"a": view}) as table, mapped(table) as views:
        assert bytes(views["a"].data) == b"5678"
        views["a"].data[0] = 0
    assert file.read_bytes() == b"12345678"


@pytest.mark.parametrize(
    "said",
    [
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "(0.11 GiB KV cache is needed, which is larger than the available KV cache memory (0.05 GiB)",
        "Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU memory utilization (0.9, 72 GiB)",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes",
    ],
)
def test_want_of_memory_is_known_by_what_torch_and_vllm_say(said: str) -> None:
    assert is_shortage(ConfigError(f"engine: vLLM cannot serve m: {said}"))


def test_other_errors_are_no_want_of_memory() -> None:
    assert not is_shortage(ConfigError("engine.kv_total: 3 tokens are 0 blocks of 32"))


def test_the_kv_cache_asked_for_is_said_as_far_as_the_model_says_enough(tmp_path: Path) -> None:
    options = {"model_path": str(tmp_path), "max_running": 4, "dtype": "bfloat16"}
    assert kv_demand(options) == ""
    config = tmp_path / "config.json"
    config.write_text('{"max_position_embeddings": 1024}')
    assert kv_demand(options) == "a KV cache of 4096 tokens (engine.max_running sequences of engine.max_model_len)"
    config.write_text(
        '{"max_position_embeddings": 1024, "num_hidden_layers": 28, "num_attention_heads": 28,'
        ' "num_key_value_heads": 4, "hidden_size": 3584}'
    )
    assert kv_demand({**options, "kv_total": 65536}) == (
        "a KV cache of 65536 tokens (engine.kv_total) is 3.50 GiB, 57344 bytes a token"
    )
    assert kv_demand({"max_running": 4}) == ""


def test_the_decoder_of_a_folder_leaves_special_tokens_out(tmp_path: Path) -> None:
    tokenizer = symbol_tokenizer(list("abc"), separator="", max_length=16)
    tokenizer.save_pretrained(tmp_path)
    decode = load_decoder(ModelConfig(path=tmp_path))
    ids = tuple(tokenizer("cab")["input_ids"])
    assert decode((*ids, tokenizer.eos_token_id)) == tokenizer.decode(list(ids), skip_special_tokens=True) == "cab"
    assert decode(()) == ""
    with pytest.raises(ConfigError, match="has no usable tokenizer"):
        load_decoder(ModelConfig(path=tmp_path / "nothing"))
