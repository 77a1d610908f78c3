"""A tokenizer for a model that has none: each token is a word of its own, so that equal texts are equal tokens."""

from __future__ import annotations

from pathlib import Path

UNKNOWN = 0


def write_tokenizer(directory: Path, vocabulary: int, longest: int) -> Path:
    """Write it to ``directory``, for ``vllm serve --tokenizer`` and for ``vllm bench serve --tokenizer``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"w{UNKNOWN}"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=longest, clean_up_tokenization_spaces=False
    )
    whole.save_pretrained(str(directory))
    return directory
