"""A tiny random Llama with a tokenizer, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.vllm import LLM

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model whose tokens are bytes, and a chat template."""
    directory = tmp_path_factory.mktemp("bytes")
    letters = sorted(ByteLevel.alphabet())
    save_tiny_model(directory, tiny_config("llama", vocab_size=len(letters)))
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def llm(checkpoint: Path) -> Iterator[LLM]:
    """As programs written for vLLM make it."""
    with LLM(
        str(checkpoint), dtype="float32", block_size=4, num_gpu_blocks_override=200, disable_log_stats=False
    ) as made:
        yield made
