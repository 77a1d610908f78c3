"""The tokenizer of bench.serve, as vLLM uses it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.demo.cluster import DEMO_SHAPE
from bench.serve.tokenizer import write_tokenizer

VOCABULARY = 2048


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from vllm.tokenizers import get_tokenizer

    folder: Path = tmp_path_factory.mktemp("words")
    return get_tokenizer(str(write_tokenizer(folder, VOCABULARY, 32768, DEMO_SHAPE.config())))


@pytest.mark.slow
def test_text_and_tokens_convert_without_loss(tokenizer) -> None:
    tokens = random.Random(0).choices(range(VOCABULARY), k=5000)
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text) == tokens
    assert tokenizer.encode(f" {text}") == tokens
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.num_special_tokens_to_add() == 0
    assert tokenizer.all_special_ids in ([], [0])


@pytest.mark.slow
def test_no_text_exceeds_vllms_character_limit_for_its_tokens(tokenizer) -> None:
    """vLLM limits the characters of a text to its token limit times the longest token."""
    assert len(tokenizer.decode([VOCABULARY - 1] * 1000)) <= 1000 * tokenizer.max_chars_per_token
