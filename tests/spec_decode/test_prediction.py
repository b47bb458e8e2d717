"""Predicted outputs: the drafter alone over texts that part and meet again, in the engine, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLM, AsyncLLMEngine, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.contracts.sampling import SamplingParams as Params
from dovetail.contracts.speculation import DraftBatch, DraftRequest
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.server.live import live_server
from dovetail.spec_decode.prediction import PredictionDrafter, PredictionOptions
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.testing.story_model import STORY, save_story_model

PROMPT = "Once upon a time, there was a little girl named Lily."
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
FIXED = {"num_tokens": 4, "length": "fixed"}
DRAFTERS = {
    "predicted": {"name": "prediction", **FIXED},
    "lookup": {"name": "ngram", **FIXED},
    "both": {"name": "cascade", "stages": ["predicted", "lookup"], **FIXED},
}


class TestPredictionDrafter(DraftWorkerSuite):
    plugin = PredictionDrafter


def proposals(prediction: list[int], output: list[int], count: int = 4) -> list[list[int]]:
    """What is drafted before each token of an output that comes token by token, from its second token on."""
    worker = PredictionDrafter(PredictionOptions(), TestPredictionDrafter().create().setup)
    expected = np.array(prediction, dtype=np.int32)
    found = []
    for end in range(1, len(output)):
        known = np.array([7, 7, *output[:end]], dtype=np.int32)
        request = DraftRequest(0, known, 2, count, Params(), np.array([0]), np.zeros(count), prediction=expected)
        (draft,) = worker.propose(DraftBatch([request], None))
        found.append([] if draft is None else list(draft.token_ids))
    return found


@given(
    length=st.integers(30, 80),
    start=st.integers(5, 20),
    removed=st.integers(0, 6),
    added=st.lists(st.integers(1000, 1100), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_after_one_edit_the_rest_is_drafted_again_as_soon_as_one_token_agrees(
    length: int, start: int, removed: int, added: list[int]
) -> None:
    prediction = list(range(length))
    output = prediction[:start] + added + prediction[start + removed :]
    drafts = proposals(prediction, output)
    for place in range(1, len(output)):
        draft, follows = drafts[place - 1], output[place : place + 4]
        if place < start or place > start + len(added):
            assert draft == prediction[output[place - 1] + 1 :][:4]
            assert place < start or draft == follows
        elif place > start:
            assert draft == [], "nothing is drafted where the output says what nobody predicted"


def test_of_equal_matches_the_nearest_is_followed() -> None:
    block = [1, 2, 3, 4, 5, 6]
    prediction = [*block, 10, *block, 20, *block, 30]
    output = [*block, 10, 99, 98, 97, *block, 20, 21]
    drafts = proposals(prediction, output)
    # Behind `10` the output says three tokens of its own, and goes on with the second of three equal blocks.
    assert drafts[len(output) - 3] == [20, 1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    save_story_model(directory)
    return directory


def config(model: Path, **speculative: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "chat_template": "{{ messages[0].content }}"},
        "cache": {"num_blocks": 128},
        "executor": {"threads": 1},
        "speculative": {"drafters": DRAFTERS, "default": None, **speculative},
    }


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(**config(model)) as llm:
        yield llm


def edited(text: str) -> str:
    """The text with a word replaced, one left out and one put in."""
    return text.replace("big cat", "grey dog").replace("She liked to play. ", "", 1).replace("day", "fine day", 1)


@pytest.mark.parametrize("drafter", ["predicted", "both"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prediction_makes_the_output_faster_and_never_another(llm: LLM, drafter: str, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature, seed=4)
    (plain,) = llm.generate(PROMPT, replace(params, speculation="off"), use_tqdm=False)
    text = plain.outputs[0].text
    outputs = [
        llm.generate(PROMPT, replace(params, speculation=drafter, prediction=given), use_tqdm=False)[0]
        for given in (text, edited(text), llm.get_tokenizer().encode(text), "Nothing of this will come.")
    ]
    assert [output.outputs[0].token_ids for output in outputs] == [plain.outputs[0].token_ids] * 4
    whole, part, ids, none = (output.metrics for output in outputs)
    assert whole.num_accepted_from_prediction == whole.num_drafted_from_prediction >= 40
    assert ids.num_accepted_from_prediction == ids.num_drafted_from_prediction >= 40
    assert 15 <= part.num_accepted_from_prediction < whole.num_accepted_from_prediction
    assert none.num_accepted_from_prediction <= 2
    if drafter == "both":
        assert none.num_drafted > none.num_drafted_from_prediction, "the other stage drafts where nothing was predicted"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculation": "lookup"},
            "drafter 'lookup' does not read it: name one that does .speculation: both",
        ),
        ({"speculation": "off"}, "no drafter guesses for the request"),
        ({"speculation": "predicted", "prediction": "word " * 5000}, "tokens or more, and max_model_len is"),
        ({"speculation": "predicted", "prediction": [5, 1_000_000]}, "prediction holds 1000000, which is no token id"),
        ({"speculation": "predicted", "prediction": {"a": 1}}, "prediction must be a list of token ids"),
    ],
)
def test_a_prediction_that_nobody_reads_is_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(PROMPT, replace(PARAMS, **({"prediction": STORY[:40]} | changes)), use_tqdm=False)


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    with (
        AsyncLLMEngine.from_config(config(model, default="predicted")) as engine,
        live_server(engine, {"chat": (ChatRoute, ChatRoute.Options())}, model_names=("story",)) as live,
        httpx.Client(base_url=live.url, timeout=60) as client,
    ):
        yield client


def ask(client: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    return client.post("/v1/chat/completions", json=body | fields)


def test_chat_counts_what_was_accepted_of_a_prediction(client: httpx.Client) -> None:
    plain = ask(client).json()
    text = plain["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in plain["usage"]
    parts = [{"type": "text", "text": text[:50]}, {"type": "text", "text": edited(text[50:])}]
    for content in (text, parts):
        prediction = {"type": "content", "content": content}
        answer = ask(client, prediction=prediction).json()
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 10
        assert (details["rejected_prediction_tokens"] == 0) == (content is text)
        stream = ask(client, prediction=prediction, stream=True, stream_options={"include_usage": True}).text
        events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
        assert events[-1]["usage"] == answer["usage"]


def test_chat_refuses_a_prediction_that_nobody_reads(client: httpx.Client) -> None:
    prediction = {"type": "content", "content": "Once upon a time"}
    response = ask(client, prediction=prediction, speculation="lookup")
    assert response.status_code == 400
    assert "drafter 'lookup' does not read it" in response.json()["error"]["message"]
    assert ask(client, prediction={"type": "text", "content": "a"}).status_code == 400
