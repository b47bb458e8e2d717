"""A drafter that reads text, written as a third party would: it drafts a sentence that its option gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.testing.story_model import STORY, save_story_model

PLUGIN = """
from pathlib import Path

from tokenizers import Tokenizer

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft, DraftWorker, LoadsModel, ReadsTokenizer


class SentenceOptions(PluginOptions):
    sentence: str
    path: Path | None = None


class Sentence(ReadsTokenizer, LoadsModel):
    contract = (1, 1)
    Options = SentenceOptions

    @classmethod
    def model_section(cls, options):
        return None if options.path is None else {"path": str(options.path)}

    @classmethod
    def check(cls, need, options, environment):
        return () if need.has_tokenizer_json else ("it drafts text and the model has no tokenizer",)

    @classmethod
    def reads_tokenizer(cls, options):
        return True

    def __init__(self, options, setup):
        super().__init__(options, setup)
        source = setup.tokenizer_json if setup.model is None else setup.model.tokenizer_json
        self.ids = Tokenizer.from_str(source).encode(options.sentence, add_special_tokens=False).ids

    def propose(self, batch):
        done = [len(request.token_ids) - request.num_prompt_tokens for request in batch.requests]
        return [Draft(self.ids[n : n + request.max_drafts]) for n, request in zip(done, batch.requests)]
"""
PROMPT, SENTENCE = "Once upon a time,", " there was a little girl named Lily. She liked to play. One day,"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reads")
    for name, layers in (("target", 2), ("draft", 1)):
        save_story_model(directory / name, num_layers=layers)
    (directory / "sentence.py").write_text(PLUGIN)
    return directory


@pytest.mark.parametrize("own_model", [False, True])
def test_a_drafter_is_handed_the_tokenizer_of_the_target_and_of_its_own_model(models: Path, own_model: bool) -> None:
    assert STORY.startswith(PROMPT + SENTENCE)
    drafter = {
        "name": f"{models}/sentence.py:Sentence",
        "sentence": SENTENCE,
        "num_tokens": 4,
        "length": "fixed",
    } | ({"path": str(models / "draft")} if own_model else {})
    model = {"path": str(models / "target"), "dtype": "float32"}
    with LLM(model=model, cache={"memory_gib": 0.1}, speculative={"drafters": {"sentence": drafter}}) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(llm.get_tokenizer().encode(SENTENCE)))
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].text == SENTENCE
    metrics = output.metrics
    # The story's own tokens were guessed, so that all but the bonus tokens were drafts that stand.
    assert metrics.num_accepted == metrics.num_drafted > 10


def test_a_drafter_learns_beforehand_that_there_is_no_tokenizer(models: Path) -> None:
    drafter = {"name": f"{models}/sentence.py:Sentence", "sentence": SENTENCE}
    model = {"path": str(models / "target"), "tokenizer_mode": "none"}
    with pytest.raises(ConfigError, match="it drafts text and the model has no tokenizer"):
        LLM(model=model, speculative={"drafters": {"sentence": drafter}})
