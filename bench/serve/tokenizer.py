"""A tokenizer for a model that has none: each token is a word of its own, so that equal texts are equal tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SPACE = "▁"
"""A part of each token, because vLLM limits the characters of a text to its token limit times the longest token."""


def write_tokenizer(directory: Path, vocabulary: int, longest: int, config: Mapping[str, object]) -> Path:
    """Write it to ``directory``, for ``vllm serve --tokenizer`` and for ``vllm bench serve --tokenizer``.

    ``config`` is the model's; without one beside the tokenizer, vLLM looks for it twice, with a pause.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"{SPACE}w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"{SPACE}w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE)
    tokenizer.decoder = decoders.Metaspace(SPACE)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, clean_up_tokenization_spaces=False
    )
    whole.save_pretrained(str(directory))
    (directory / "config.json").write_text(json.dumps(config))
    return directory
