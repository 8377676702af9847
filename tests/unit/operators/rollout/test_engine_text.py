"""What tokenizers make of response tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from laminar.operators.operator import ModelConfig
from laminar.operators.rollout.engines.text import decoder_of, load_decoder
from laminar.pipeline.examples.tokenizer import symbol_tokenizer

IDS = (5, 0, 1, 4, 6)
"""Special tokens among them."""


class Shouting(PreTrainedTokenizerFast):
    """Has its own way of decoding."""

    def _decode(self, *given: Any, **named: Any) -> str:
        return str(super()._decode(*given, **named)).upper()


class Whispering(PreTrainedTokenizerFast):
    """Has its own way of being asked."""

    def decode(self, *given: Any, **named: Any) -> str:
        return f"({super().decode(*given, **named)})"


def made() -> Any:
    return symbol_tokenizer(["a", "b", ",", "c"], separator=" ", max_length=64)


@pytest.mark.parametrize("clean_up", [False, True])
def test_a_decoder_says_what_the_tokenizer_says_without_special_tokens(tmp_path: Path, clean_up: bool) -> None:
    tokenizer = made()
    tokenizer.clean_up_tokenization_spaces = clean_up
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer.decode(list(IDS), skip_special_tokens=True)
    assert expected != tokenizer.decode(list(IDS))
    assert decoder_of(tokenizer)(IDS) == expected
    assert decoder_of(tokenizer)(list(IDS)) == expected
    assert load_decoder(ModelConfig(path=tmp_path))(IDS) == expected


def test_cleaning_up_is_not_passed_over() -> None:
    tokenizer = made()
    tokenizer.clean_up_tokenization_spaces = True
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("a", ",", "c")]
    assert decoder_of(tokenizer)(ids) == "a, c"


def test_a_tokenizer_with_its_own_way_of_decoding_is_asked() -> None:
    shouting = Shouting(tokenizer_object=made().backend_tokenizer)
    ids = made().convert_tokens_to_ids(["a", "c"])
    whispering = Whispering(tokenizer_object=made().backend_tokenizer)
    assert [decoder_of(one)(ids) for one in (made(), shouting, whispering)] == ["a c", "A C", "(a c)"]


def test_one_without_the_tokenizers_library_is_asked() -> None:
    class Slow:
        clean_up_tokenization_spaces = False

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            assert isinstance(ids, list)
            assert skip_special_tokens
            return "-".join(map(str, ids))

    assert decoder_of(Slow())((1, 2)) == "1-2"
