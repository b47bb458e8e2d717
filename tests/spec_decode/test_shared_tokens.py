"""Draft models with another tokenizer than the target's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import DraftModel, DraftModelInfo, SpeculationNeed
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.spec_decode.draft_model import DraftModelDrafter
from dovetail.spec_decode.shared_tokens import SharedTokens, Vocabulary, mean_rows, read_vocabulary, split
from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite
from dovetail.testing.story_model import STORY, save_story_model
from dovetail.testing.tiny_models import tiny_config, tiny_model

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = ["Once upon a time", "One day, Lily", "The cat was"]


def words(*texts: str) -> str:
    """A tokenizer of these tokens, as SentencePiece writes them."""
    tokenizer: Any = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token=texts[0]))
    tokenizer.decoder = decoders.Metaspace()
    text: str = tokenizer.to_str()
    return text


def byte_level(size: int) -> Any:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([STORY + "äöü 😀 ..."], trainer)
    return tokenizer


class TestSharedTokens(PagedDraftWorkerSuite):
    """The target's even tokens are the draft model's, its odd ones are two of these."""

    plugin = DraftModelDrafter
    options: ClassVar[Mapping[str, Any]] = {"path": "made by the suite", "vocabulary": "shared_tokens"}
    vocab_size = 50
    own_size = 27
    num_draws = 800

    def tokenizer_json(self) -> str:
        texts = [f"▁{index}" if index % 2 == 0 else f"▁{index - 1}▁{(index + 1) % 50}" for index in range(50)]
        return words(*texts)

    def need(self) -> SpeculationNeed:
        config = self._config().to_dict()
        size = LlamaFamily(PluginOptions()).size(config)
        info = DraftModelInfo(config, size, "float32", "other texts")
        return replace(super().need(), model=info, has_tokenizer_json=True)

    def _config(self) -> Any:
        return tiny_config("llama", vocab_size=self.own_size, hidden_size=32, architectures=["LlamaForCausalLM"])

    def own_model(self) -> DraftModel:
        config = self._config()
        context = self.create_context()
        module = LlamaFamily(PluginOptions()).create(config.to_dict(), context)
        module.load_weights(tiny_model(config).state_dict().items())
        own = words("nothing", *(f"▁{index}" for index in range(48, -2, -2)), "else")
        return DraftModel(module, context.attention_layers, 256, own, self.own_size)


def test_byte_level_tokens_are_read_as_the_library_decodes_them() -> None:
    tokenizer = byte_level(300)
    found = read_vocabulary(tokenizer.to_str(), 300)
    assert found.special == {0: "<s>"}
    assert len(found.texts) == tokenizer.get_vocab_size() - 1
    ids = tokenizer.encode(STORY + "äöü 😀 ...").ids
    assert b"".join(found.texts[token_id] for token_id in ids) == (STORY + "äöü 😀 ...").encode()


def test_sentence_piece_tokens_are_spaces_and_bytes() -> None:
    found = read_vocabulary(words("<unk>", "▁the", "<0x0A>", "cat", "▁"), 4)
    assert found.texts == {0: b"<unk>", 1: b" the", 2: b"\n", 3: b"cat"}


@given(st.text(alphabet="abc ", max_size=12), st.sets(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=12))
def test_a_text_is_made_up_of_the_longest_tokens(text: str, more: set[str]) -> None:
    tokens = {token.encode(): index for index, token in enumerate(sorted(more | set("abc ")))}
    texts = {index: token for token, index in tokens.items()}
    found = split(text.encode(), tokens)
    assert b"".join(texts[index] for index in found) == text.encode()
    start = 0
    for index in found:
        token = texts[index]
        assert not any(other.startswith(token) and len(other) > len(token) for other in tokens
                       if text.encode()[start:].startswith(other))  # fmt: skip
        start += len(token)


def test_tokens_are_paired_by_text_and_special_ones_by_name() -> None:
    target = Vocabulary({0: b"a", 1: b"ab", 2: b"\xff", 3: b"c", 4: b"a"}, {5: "<s>", 6: "<other>", 7: "c"})
    own = Vocabulary({3: b"a", 1: b"b", 0: b"c", 4: b"x"}, {2: "<s>"})
    shared = SharedTokens(target, own, 9, CPU)
    assert list(zip(shared.own_ids.tolist(), shared.target_ids.tolist(), strict=True)) == [(0, 3), (2, 5), (3, 0)]
    pieces, counts = shared.read(np.array([1, 0, 5, 8, 4]))
    # What has no text at all is read as the draft model's token 0.
    assert pieces.tolist() == [3, 1, 3, 2, 0, 3]
    assert counts.tolist() == [2, 1, 1, 1, 1]


def test_means_are_taken_over_each_group() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert mean_rows(rows, np.array([2, 1])).tolist() == [[2.0, 3.0], [5.0, 6.0]]


def permuted(model: Path, directory: Path) -> Path:
    """The same model under other token ids."""
    shutil.copytree(model, directory)
    parts = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = parts["model"]["vocab"]
    order = np.random.default_rng(0).permutation(len(vocabulary))
    parts["model"]["vocab"] = {token: int(order[token_id]) for token, token_id in vocabulary.items()}
    for token in parts["added_tokens"]:
        token["id"] = int(order[token["id"]])
    (directory / "tokenizer.json").write_text(json.dumps(parts))
    tensors = load_file(directory / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    moved = table.clone()
    moved[torch.from_numpy(order)] = table
    save_file(tensors | {"model.embed_tokens.weight": moved}, directory / "model.safetensors", {"format": "pt"})
    return directory


def create(target: Path, draft: Path, **options: Any) -> LLM:
    drafter = {"name": "draft_model", "path": str(draft), "dtype": "float32", "length": "fixed"} | options
    return LLM(
        model={"path": str(target), "dtype": "float32"},
        cache={"memory_gib": 0.1},
        speculative={"drafters": {"it": drafter}},
    )


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    save_story_model(directory)
    return directory


def test_the_target_under_other_token_ids_guesses_everything(story: Path, tmp_path: Path) -> None:
    """Whatever is wrong with what it reads or with what its guesses are taken for, some would be rejected."""
    other = permuted(story, tmp_path / "other")
    with create(story, other, vocabulary="shared_tokens") as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for output in outputs:
        assert output.metrics.drafter_error is None
        assert output.metrics.num_accepted == output.metrics.num_drafted > 0


def test_another_tokenizer_is_refused_unless_the_config_allows_it(story: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another tokenizer.*or set vocabulary to shared_tokens"):
        create(story, permuted(story, tmp_path / "other"))


def test_a_draft_model_without_a_tokenizer_is_refused(story: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(story, tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    with pytest.raises(DovetailError, match=r"drafters\.it, its own model: the model has no tokenizer"):
        create(story, bare, vocabulary="shared_tokens")
