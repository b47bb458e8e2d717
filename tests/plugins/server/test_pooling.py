"""Embeddings, scores and reranking behind a server, over a decoder and over encoders: what `LLM` gives."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dovetail import LLM, AsyncLLMEngine, PoolingParams
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.explain.route import ExplainRoute
from dovetail.plugins.routes.pooling.route import PoolingRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.tiny_encoders import save_tiny_encoder, save_word_pieces
from dovetail.testing.watched_engine import WatchedEngine
from tests.waiting import wait_until

CheckError = Callable[..., dict[str, Any]]

SERVED: dict[str, type[Route]] = {
    "pooling": PoolingRoute,
    "completions": CompletionsRoute,
    "chat": ChatRoute,
    "explain": ExplainRoute,
}
ROUTES: dict[str, tuple[type[Route], PluginOptions]] = {label: (kind, kind.Options()) for label, kind in SERVED.items()}
TEXTS = ["the cat sat on the mat", "a dog", "what is a cat ?"]
QUERY = "what is a cat ?"
DOCUMENTS = ["the dog sat", "the cat sat on the mat", "a mat", "what is a cat ?"]


@dataclass(frozen=True)
class Stage:
    """A model behind a server, and by itself."""

    llm: LLM
    http: httpx.Client
    openai: openai.OpenAI


def staged(config: dict[str, Any]) -> Iterator[Stage]:
    llm = LLM(**config)
    with (
        AsyncLLMEngine.from_config(config) as engine,
        live_server(engine, ROUTES, model_names=("tiny",)) as live,
        httpx.Client(base_url=live.url, timeout=60) as http,
        openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield Stage(llm, http, client)
    llm.shutdown()


@pytest.fixture(scope="module")
def decoder(story_model: Path) -> Iterator[Stage]:
    model = {"path": str(story_model), "dtype": "float32", "max_model_len": 64}
    yield from staged({"model": model, "cache": {"block_size": 4, "num_blocks": 100}, "executor": {"threads": 1}})


def encoder_config(directory: Path, **kind: Any) -> dict[str, Any]:
    save_tiny_encoder(directory, **kind)
    save_word_pieces(directory)
    return {"model": {"path": str(directory)}, "executor": {"threads": 1}}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from staged(encoder_config(tmp_path_factory.mktemp("encoder")))


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from staged(encoder_config(tmp_path_factory.mktemp("cross-encoder"), num_labels=1))


@pytest.fixture(params=["decoder", "encoder"])
def stage(request: pytest.FixtureRequest) -> Stage:
    found: Stage = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["decoder", "encoder", "cross_encoder"])
def scorer(request: pytest.FixtureRequest) -> Stage:
    found: Stage = request.getfixturevalue(request.param)
    return found


def embedded(llm: LLM, inputs: Any, **params: Any) -> list[list[float]]:
    outputs = llm.embed(inputs, pooling_params=PoolingParams(**params), use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def same(found: list[list[float]], expected: list[list[float]]) -> bool:
    return len(found) == len(expected) and all(
        one == pytest.approx(other, abs=1e-6) for one, other in zip(found, expected, strict=True)
    )


def test_embeddings_are_those_of_embed(stage: Stage) -> None:
    """By the client's own way, which asks for base64."""
    answer = stage.openai.embeddings.create(model="tiny", input=TEXTS)
    assert same([one.embedding for one in answer.data], embedded(stage.llm, TEXTS))
    assert [one.index for one in answer.data] == [0, 1, 2]
    tokenizer = stage.llm.get_tokenizer()
    assert tokenizer is not None
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(tokenizer.encode(one)) for one in TEXTS)
    assert answer.model == "tiny"


@pytest.mark.parametrize("given", ["a cat", ["a cat"], [5, 6, 7], [[5, 6, 7], [8]]])
def test_an_input_is_a_text_token_ids_or_a_list_of_such(stage: Stage, given: Any) -> None:
    answer = stage.openai.embeddings.create(model="tiny", input=given, encoding_format="float")
    assert same([one.embedding for one in answer.data], embedded(stage.llm, given))


def test_base64_holds_the_same_numbers(stage: Stage) -> None:
    def ask(form: str) -> Any:
        body = {"input": TEXTS[0], "encoding_format": form}
        return stage.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]

    numbers = ask("float")
    assert list(struct.unpack(f"<{len(numbers)}f", base64.b64decode(ask("base64")))) == numbers


def test_dimensions_cut_and_normalize_again(stage: Stage) -> None:
    answer = stage.openai.embeddings.create(model="tiny", input=TEXTS, dimensions=8)
    for one, whole in zip(answer.data, embedded(stage.llm, TEXTS, normalize=False), strict=True):
        length = math.hypot(*whole[:8])
        assert one.embedding == pytest.approx([x / length for x in whole[:8]], abs=1e-6)


def test_fields_of_ours_and_of_vllm(stage: Stage) -> None:
    body = {"normalize": False, "truncate_prompt_tokens": 2, "user": "me", "add_special_tokens": False}
    answer = stage.openai.embeddings.create(model="tiny", input=TEXTS[0], extra_body=body)
    tokenizer = stage.llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(TEXTS[0], add_special_tokens=False)[:2]
    assert same([answer.data[0].embedding], embedded(stage.llm, [ids], normalize=False))
    assert answer.usage.prompt_tokens == 2


def test_more_inputs_than_the_engine_gets_at_once(engine: AsyncLLMEngine, decoder: Stage) -> None:
    options = PoolingRoute.Options.model_validate({"max_inputs": 9, "inputs_at_once": 2})
    with live_server(engine, {"pooling": (PoolingRoute, options)}) as live:
        texts = [f"cat {'mat ' * index}" for index in range(9)]
        answer = httpx.post(live.url + "/v1/embeddings", json={"input": texts}, timeout=60)
        assert same([one["embedding"] for one in answer.json()["data"]], embedded(decoder.llm, texts))
        refused = httpx.post(live.url + "/v1/embeddings", json={"input": [*texts, "dog"]}, timeout=60)
        assert refused.status_code == 400
        assert "input has 10 entries, and the server takes 9" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("first", "second"), [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_one_text_is_scored_with_many(scorer: Stage, first: str, second: str) -> None:
    answer = scorer.http.post("/v1/score", json={first: QUERY, second: DOCUMENTS}).json()
    expected = [one.outputs.score for one in scorer.llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-6)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    assert {one["object"] for one in answer["data"]} == {"score"}


def test_as_many_texts_are_scored_with_as_many(scorer: Stage) -> None:
    answer = scorer.http.post("/score", json={"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}).json()
    expected = scorer.llm.score(DOCUMENTS, DOCUMENTS[::-1], use_tqdm=False)
    assert [one["score"] for one in answer["data"]] == pytest.approx([one.outputs.score for one in expected], abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in expected)


def test_scores_of_a_cross_encoder_before_the_activation(cross_encoder: Stage) -> None:
    body = {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}
    answer = cross_encoder.http.post("/score", json=body).json()
    params = PoolingParams(use_activation=False)
    expected = cross_encoder.llm.score(QUERY, DOCUMENTS, pooling_params=params, use_tqdm=False)
    assert [one["score"] for one in answer["data"]] == pytest.approx([one.outputs.score for one in expected], abs=1e-6)


def test_a_document_that_is_too_long_is_cut_behind_the_query(cross_encoder: Stage) -> None:
    """The query and the special tokens stay: two documents that begin alike score alike."""
    tokenizer = cross_encoder.llm.get_tokenizer()
    assert tokenizer is not None
    whole = tokenizer.encode_pair(QUERY, "cat " * 8)[0]
    body = {"query": QUERY, "documents": ["cat " * 7, "cat " * 2000], "truncate_prompt_tokens": len(whole) - 1}
    answer = cross_encoder.http.post("/rerank", json=body).json()
    short, long = (one["relevance_score"] for one in answer["results"])
    assert short == pytest.approx(long, abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == 2 * (len(whole) - 1)
    params = PoolingParams(truncate_prompt_tokens=len(whole) - 1)
    (offline,) = cross_encoder.llm.score(QUERY, "cat " * 2000, pooling_params=params, use_tqdm=False)
    assert offline.outputs.score == pytest.approx(long, abs=1e-6)
    body["truncate_prompt_tokens"] = -1
    assert cross_encoder.http.post("/rerank", json=body).status_code == 200


def test_documents_come_in_order_of_relevance(scorer: Stage) -> None:
    answer = scorer.http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
    scores = [one.outputs.score for one in scorer.llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(sorted(scores)[::-1], abs=1e-6)
    assert [one["document"]["text"] for one in answer["results"]] == [DOCUMENTS[index] for index in order]
    body = {"query": QUERY, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 2, "return_documents": False}
    for path in ("/rerank", "/v2/rerank"):
        best = scorer.http.post(path, json=body).json()
        assert [(one["index"], "document" in one) for one in best["results"]] == [(index, False) for index in order[:2]]


def test_any_task_can_be_asked_for(decoder: Stage, cross_encoder: Stage) -> None:
    body = {"input": "a cat", "task": "token_embed", "normalize": False}
    (found,) = decoder.http.post("/pooling", json=body).json()["data"]
    params = PoolingParams(task="token_embed", normalize=False)
    (expected,) = decoder.llm.encode("a cat", params, use_tqdm=False)
    assert same(found["data"], expected.outputs.data.tolist())
    (found,) = cross_encoder.http.post("/pooling", json={"input": "a cat", "task": "classify"}).json()["data"]
    assert found["data"] == pytest.approx(cross_encoder.llm.classify("a cat", use_tqdm=False)[0].outputs.probs)


@pytest.mark.parametrize("options", [{}, {"use_activation": False}])
def test_texts_are_classified(cross_encoder: Stage, options: dict[str, Any]) -> None:
    answer = cross_encoder.http.post("/classify", json={"input": TEXTS, **options}).json()
    expected = cross_encoder.llm.classify(TEXTS, pooling_params=PoolingParams(**options), use_tqdm=False)
    assert [one.pop("probs") for one in answer["data"]] == [pytest.approx(one.outputs.probs) for one in expected]
    assert answer["data"] == [{"index": i, "label": "LABEL_0", "num_classes": 1} for i in range(3)]
    assert answer["id"].startswith("classify-")
    assert answer["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in expected)


def test_the_best_label_has_the_name_that_the_checkpoint_gives_it(tmp_path: Path) -> None:
    config = encoder_config(tmp_path, num_labels=3)
    names = {"0": "sad", "1": "glad", "2": "neither"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "id2label": names}))
    for stage in staged(config):
        answer = stage.http.post("/classify", json={"input": "a cat"}).json()
        (expected,) = stage.llm.classify("a cat", use_tqdm=False)
        (found,) = answer["data"]
        assert found["probs"] == pytest.approx(expected.outputs.probs)
        assert found["label"] == names[str(found["probs"].index(max(found["probs"])))]
        assert found["num_classes"] == 3


def test_a_model_without_labels_classifies_nothing(decoder: Stage, check_error: CheckError) -> None:
    response = decoder.http.post("/classify", json={"input": "a cat"})
    assert "no score head" in check_error(response, 400, "model")["message"]


def test_what_became_of_a_request_is_explained_by_its_id(encoder: Stage) -> None:
    answer = encoder.http.post("/v1/embeddings", json={"input": TEXTS, "request_id": "mine"}).json()
    assert answer["id"] == "embd-mine"
    for name in ("mine", "embd-mine"):
        assert len(encoder.http.get(f"/v1/explain/{name}").json()["requests"]) == 3


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, None, "input"),
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": ["a", ""]}, "input.1", "is empty"),
        ({"input": [[1], []]}, "input.1", "is empty"),
        ({"input": ["a", 1]}, "input.0", "mixes token ids"),
        ({"input": [10**6]}, "input", "no token id"),
        ({"input": ["a", "cat " * 2000]}, "input.1", "max_model_len"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a", "dimensions": 65}, "dimensions", "embeddings of this model have 64"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": "a", "priority": 1}, "priority", "knows no priorities"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "normalise": True}, "normalise", "did you mean normalize"),
    ],
)
def test_embeddings_that_cannot_be(
    stage: Stage, body: dict[str, Any], param: str | None, message: str, check_error: CheckError
) -> None:
    error = check_error(stage.http.post("/v1/embeddings", json=body), 400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/score", {}, "text_1", "a score is of two sides"),
        ("/score", {"text_1": "a"}, "text_2", "got text_1"),
        ("/score", {"text_1": "a", "documents": "b"}, None, "got text_1, documents"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "is empty"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "as many with as many"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "is empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "is empty"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents.1", "is empty"),
        ("/rerank", {"query": "a", "documents": ["b", "cat " * 2000]}, "documents.1", "max_model_len"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "1 or more"),
        ("/pooling", {"input": "a", "task": "summarize"}, "task", "one of embed"),
    ],
)
def test_scores_that_cannot_be(
    scorer: Stage, path: str, body: dict[str, Any], param: str | None, message: str, check_error: CheckError
) -> None:
    assert message in check_error(scorer.http.post(path, json=body), 400, param)["message"]


def test_what_only_a_cross_encoder_or_a_cosine_has(
    encoder: Stage, cross_encoder: Stage, check_error: CheckError
) -> None:
    body = {"text_1": "a", "text_2": "b", "use_activation": True}
    assert "scores by cosines" in check_error(encoder.http.post("/score", json=body), 400, "use_activation")["message"]
    mixed = {"text_1": "a", "text_2": ["b", [5]]}
    check_error(cross_encoder.http.post("/score", json=mixed), 400, "text_2.1")
    mixed = {"text_1": "a", "text_2": [[6], [5]]}
    error = check_error(cross_encoder.http.post("/score", json=mixed), 400, "text_2.0")
    assert "not one of each" in error["message"]


def test_a_model_that_is_not_served_is_not_found(stage: Stage, check_error: CheckError) -> None:
    with pytest.raises(openai.NotFoundError):
        stage.openai.embeddings.create(model="other", input="a")
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        check_error(stage.http.post(path, json={**body, "model": "other"}), 404, "model")


def test_an_encoder_generates_nothing(encoder: Stage, check_error: CheckError) -> None:
    error = check_error(encoder.http.post("/v1/completions", json={"prompt": "a cat"}), 400)
    assert "the model is an encoder" in error["message"]
    with pytest.raises(openai.BadRequestError):
        encoder.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


def test_without_a_pooler_the_refusal_says_what_to_do(story_model: Path, check_error: CheckError) -> None:
    config = {"model": {"path": str(story_model)}, "pooling": {"embed": None}, "executor": {"threads": 1}}
    with AsyncLLMEngine.from_config(config) as engine, live_server(engine, ROUTES) as live:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
            error = check_error(httpx.post(live.url + path, json=body, timeout=60), 400, "model")
            assert "pooling.embed is null" in error["message"]
            assert "name a pooler" in error["message"]
        error = check_error(
            httpx.post(live.url + "/pooling", json={"input": "a", "task": "classify"}, timeout=60), 400, "model"
        )
        assert "the checkpoint has no score head" in error["message"]


def test_a_client_that_leaves_ends_all_its_inputs(engine: AsyncLLMEngine) -> None:
    watched = WatchedEngine(engine)
    with live_server(watched, {"pooling": (PoolingRoute, PoolingRoute.Options())}) as live:
        asyncio.run(engine.pause("wait"))  # so that no input is computed before the client leaves
        try:
            with socket.create_connection(live.address) as connection:
                send(connection, live, {"input": [f"cat {index}" for index in range(20)]})
                wait_until(lambda: watched.num_open == 20, "the engine has all inputs")
            wait_until(lambda: watched.num_open == 0, "all inputs are aborted")
            wait_until(lambda: not live.host.under_way, "the request is over")
        finally:
            asyncio.run(engine.resume())
        assert httpx.post(live.url + "/v1/embeddings", json={"input": "a cat"}, timeout=60).status_code == 200


def test_an_input_that_the_engine_drops_is_no_result(engine: AsyncLLMEngine) -> None:
    watched = WatchedEngine(engine)
    with (
        live_server(watched, {"pooling": (PoolingRoute, PoolingRoute.Options())}) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        asyncio.run(engine.pause("wait"))
        try:
            asked = pool.submit(httpx.post, live.url + "/v1/embeddings", json={"input": ["a", "b"]}, timeout=60)
            wait_until(lambda: watched.num_open == 2, "the engine has all inputs")
            asyncio.run(engine.pause("abort"))
            answer = asked.result(60)
        finally:
            asyncio.run(engine.resume())
        assert (answer.status_code, "send it again" in answer.json()["error"]["message"]) == (503, True)


def send(connection: socket.socket, live: LiveServer, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: {live.address[0]}\r\ncontent-type: application/json\r\n"
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
