"""Embeddings of an encoder, against transformers: prompts are computed whole, and nothing is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from dovetail import LLM, PoolingParams, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.testing.tiny_encoders import save_tiny_encoder, save_word_pieces

PROMPTS = [[2, *range(40, 40 + length), 3] for length in (18, 1, 60, 7, 7, 33)]
MakeEncoder = Callable[..., tuple[LLM, Any]]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("encoder")
    oracle = save_tiny_encoder(directory)
    save_word_pieces(directory)
    return directory, oracle


@pytest.fixture
def make_encoder(encoder: tuple[Path, Any], tmp_path: Path) -> Iterator[MakeEncoder]:
    """make_encoder(modules={file: content}, ...): the engine and the transformers model."""
    engines = []

    def make(modules: dict[str, Any] | None = None, **sections: Any) -> tuple[LLM, Any]:
        directory, oracle = encoder
        if modules is not None:
            directory = Path(shutil.copytree(directory, tmp_path / "with-modules"))
        for name, content in (modules or {}).items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(json.dumps(content))
        model = {"path": str(directory)} | sections.pop("model", {})
        llm = LLM(**{"executor": {"threads": 1}, "model": model, **sections})
        engines.append(llm)
        return llm, oracle

    yield make
    for llm in engines:
        llm.shutdown()


def sentence_files(mode: str, *, normalizes: bool, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """The files of sentence-transformers beside a model."""
    prefix = "sentence_transformers.models"
    types = ["Transformer", "Pooling", *others, *(["Normalize"] if normalizes else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return {
        "modules.json": [
            {"idx": index, "name": str(index), "path": paths.get(name, ""), "type": f"{prefix}.{name}"}
            for index, name in enumerate(types)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 64, f"pooling_mode_{mode}": True},
    }


def states(oracle: Any, prompt: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = oracle(torch.tensor([prompt])).last_hidden_state[0]
    return hidden


def embeddings(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)])


def test_embeddings_are_those_of_transformers(make_encoder: MakeEncoder) -> None:
    """The mean of all states, of length 1, where no file says otherwise; steps hold some of the prompts each."""
    llm, oracle = make_encoder(model={"max_model_len": 70}, scheduler={"max_num_batched_tokens": 70, "max_num_seqs": 3})
    found = embeddings(llm, PROMPTS).double()
    expected = torch.stack([states(oracle, prompt).mean(0) for prompt in PROMPTS]).double()
    cosines = torch.nn.functional.cosine_similarity(found, expected)
    assert cosines.min() > 1 - 1e-6
    torch.testing.assert_close(found.norm(dim=1), torch.ones(len(PROMPTS), dtype=torch.float64))


def test_every_request_is_what_it_is_alone(make_encoder: MakeEncoder) -> None:
    llm, _ = make_encoder()
    together = embeddings(llm, PROMPTS)
    alone = torch.cat([embeddings(llm, [prompt]) for prompt in PROMPTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mode", "normalizes"), [("cls_token", True), ("mean_tokens", False)])
def test_the_files_of_sentence_transformers_choose(make_encoder: MakeEncoder, mode: str, normalizes: bool) -> None:
    llm, oracle = make_encoder(sentence_files(mode, normalizes=normalizes))
    hidden = states(oracle, PROMPTS[0])
    expected = hidden[0] if mode == "cls_token" else hidden.mean(0)
    expected = expected / expected.norm() if normalizes else expected
    torch.testing.assert_close(embeddings(llm, PROMPTS[:1])[0], expected, rtol=0, atol=2e-5)
    other = llm.encode(PROMPTS[0], PoolingParams(normalize=not normalizes), use_tqdm=False)[0].outputs.data
    assert bool(abs(other.norm() - 1) < 1e-5) == (not normalizes)


def test_a_module_that_nothing_computes_is_not_left_out(make_encoder: MakeEncoder) -> None:
    llm, _ = make_encoder(sentence_files("mean_tokens", normalizes=True, others=("Dense",)))
    with pytest.raises(RequestError, match=r"modules.json of the checkpoint has Dense, .* take the module out"):
        llm.embed(PROMPTS[0], use_tqdm=False)


def test_an_encoder_generates_nothing(make_encoder: MakeEncoder) -> None:
    """It says so when the request is added, and goes on embedding."""
    llm, _ = make_encoder()
    with pytest.raises(RequestError, match=r"the model is an encoder, .*: use embed or encode"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=2), use_tqdm=False)
    assert embeddings(llm, PROMPTS[:1]).shape == (1, 64)


def test_a_prompt_that_is_too_long_is_refused(make_encoder: MakeEncoder) -> None:
    llm, _ = make_encoder(model={"max_model_len": 20})
    assert embeddings(llm, [PROMPTS[0]]).shape == (1, 64)
    with pytest.raises(RequestError, match="the prompt has 62 tokens, but max_model_len is 20"):
        llm.embed(PROMPTS[2], use_tqdm=False)


def test_texts_get_the_tokens_around_them(make_encoder: MakeEncoder) -> None:
    """Whole, although the tokenizer's file cuts and fills up to 8 tokens."""
    llm, oracle = make_encoder()
    (output,) = llm.embed("the cat sat on the mat. what is a dog?", use_tqdm=False)
    assert output.prompt_token_ids[0] == 2
    assert (len(output.prompt_token_ids), output.prompt_token_ids[-1]) == (14, 3)
    expected = states(oracle, output.prompt_token_ids).mean(0)
    cosine = torch.nn.functional.cosine_similarity(torch.tensor(output.outputs.embedding), expected, dim=0)
    assert cosine > 1 - 1e-6


def test_a_cross_encoder_reads_both_texts_of_a_pair(tmp_path: Path) -> None:
    """Typed 0 and 1. Its one score goes through the sigmoid."""
    oracle = save_tiny_encoder(tmp_path, num_labels=1)
    save_word_pieces(tmp_path)
    llm = LLM(model={"path": str(tmp_path)}, executor={"threads": 1})
    texts = ["a cat sat.", "the dog"]
    scored = llm.score("what is a cat?", texts, use_tqdm=False)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for output, text in zip(scored, texts, strict=True):
        pair = tokenizer.encode("what is a cat?", text)
        assert (output.prompt_token_ids, max(pair.type_ids)) == (pair.ids, 1)
        with torch.no_grad():
            logits = oracle(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits[0]
        assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-5)
    for ask in (llm.embed, llm.encode, llm.classify, lambda text: llm.score(text, "a")):
        with pytest.raises(RequestError, match="is empty: give text or token ids"):  # not special tokens alone
            ask("")
    llm.shutdown()


def test_labels_have_probabilities(tmp_path: Path) -> None:
    oracle = save_tiny_encoder(tmp_path, "roberta", num_labels=3, pad_token_id=1)
    llm = LLM(model={"path": str(tmp_path), "tokenizer_mode": "none"}, executor={"threads": 1})
    for output, prompt in zip(llm.classify(PROMPTS, use_tqdm=False), PROMPTS, strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0].softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=0, atol=1e-5)
    llm.shutdown()


@pytest.mark.parametrize(
    ("types", "message"),
    [([0, 1], "one number of 0 to 1 for each of the 3 tokens"), ([0, 1, 2], "one number of 0 to 1")],
)
def test_types_that_tokens_cannot_have_are_refused(make_encoder: MakeEncoder, types: list[int], message: str) -> None:
    llm, _ = make_encoder()
    with pytest.raises(RequestError, match=message):
        llm.embed({"prompt_token_ids": [2, 9, 3], "token_type_ids": types}, use_tqdm=False)


@pytest.mark.nightly
def test_two_ranks_embed_as_one(make_encoder: MakeEncoder) -> None:
    llm, oracle = make_encoder(executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1})
    expected = torch.stack([states(oracle, prompt).mean(0) for prompt in PROMPTS])
    assert torch.nn.functional.cosine_similarity(embeddings(llm, PROMPTS), expected).min() > 1 - 1e-6
