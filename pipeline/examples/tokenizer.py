"""Tokenizers with a handful of symbols: one id a symbol, and ``<pad> <bos> <eos> <unk>`` in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["SPECIALS", "symbol_tokenizer"]

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")


def symbol_tokenizer(
    symbols: Sequence[str],
    *,
    separator: str,
    more_specials: Sequence[str] = (),
    add_bos: bool = False,
    chat_template: str | None = None,
    max_length: int,
) -> Any:
    """A fast tokenizer over ``symbols``, which stand in text with ``separator`` ("" or " ") between them.

    ``add_bos``: plain tokenization puts ``<bos>`` in front, as Llama's does (a rendered chat template then must be
    tokenized with ``add_special_tokens=False``). Decoding gives back the text that was encoded.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = (*SPECIALS, *more_specials)
    ids = {symbol: i for i, symbol in enumerate((*specials, *symbols))}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))  # noqa: S106
    if separator:
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    else:
        core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
        core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    if add_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    if chat_template is not None:
        made.chat_template = chat_template
    return made
