"""Adapters behind a server: each is a model of its own to clients, and comes and goes while the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from dovetail import LLM, AsyncLLMEngine, LoRARequest, SamplingParams
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.explain.route import ExplainRoute
from dovetail.plugins.routes.lora import LoRARoute
from dovetail.plugins.routes.messages.route import MessagesRoute
from dovetail.plugins.routes.metrics import MetricsRoute
from dovetail.plugins.routes.models import ModelsRoute
from dovetail.plugins.routes.playground.route import PlaygroundRoute
from dovetail.plugins.routes.responses.route import ResponsesRoute
from dovetail.plugins.routes.tokenize import TokenizeRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.chat_models import FAMILIES, save_chat_model
from dovetail.testing.tiny_adapters import save_adapter
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.testing.watched_engine import Script, WatchedEngine
from tests.waiting import wait_until

CheckError = Callable[..., dict[str, Any]]
Change = Callable[..., httpx.Response]

ROUTES: dict[str, type[Route]] = {
    "completions": CompletionsRoute,
    "chat": ChatRoute,
    "messages": MessagesRoute,
    "responses": ResponsesRoute,
    "explain": ExplainRoute,
    "tokenize": TokenizeRoute,
    "models": ModelsRoute,
    "metrics": MetricsRoute,
}
ALLOWED: tuple[type[Route], PluginOptions] = (LoRARoute, LoRARoute.Options.model_validate({"allow_updates": True}))
PROMPTS = ("Hello there", "What is the colour of the sky?", "Once upon a time")
MESSAGES: list[Any] = [{"role": "user", "content": "Hello there"}]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BODY = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat-model")
    save_chat_model(directory, FAMILIES["hermes"])
    return directory


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the adapters that the server has from the start."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(root / name, model, seed=1 + i) for i, name in enumerate(("pirate", "poet"))}


@pytest.fixture(scope="module")
def sections(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 600},
        "executor": {"threads": 1},
    }


@pytest.fixture(scope="module")
def engine(sections: dict[str, Any], folders: dict[str, Path]) -> Iterator[AsyncLLMEngine]:
    modules = {name: str(folder) for name, folder in folders.items()}
    lora = {"enabled": True, "max_loras": 2, "max_rank": 8, "modules": modules}
    with AsyncLLMEngine.from_config({**sections, "lora": lora, "telemetry": ["prometheus"]}) as created:
        yield created


@pytest.fixture(scope="module")
def server(engine: AsyncLLMEngine) -> Iterator[LiveServer]:
    routes: dict[str, tuple[type[Route], PluginOptions]] = {
        label: (kind, kind.Options()) for label, kind in ROUTES.items()
    }
    with live_server(engine, {**routes, "lora": ALLOWED}, model_names=("base", "other")) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as created:
        yield created


@pytest.fixture(scope="module")
def llm(sections: dict[str, Any]) -> Iterator[LLM]:
    """The oracle."""
    with LLM(config={**sections, "lora": {"enabled": True, "max_loras": 2, "max_rank": 8}}) as created:
        yield created


@pytest.fixture
def change(client: httpx.Client, engine: AsyncLLMEngine, folders: dict[str, Path]) -> Iterator[Change]:
    """Asks for an adapter to be loaded or unloaded; those of the test are unloaded after it."""

    def ask(what: str, **body: Any) -> httpx.Response:
        return client.post(f"/v1/{what}_lora_adapter", json=body)

    async def restore() -> None:
        for adapter in await engine.list_loras():
            if adapter.name not in folders:
                await engine.remove_lora(adapter.name)

    yield ask
    asyncio.run(restore())


def token_ids(client: httpx.Client, model: str, **more: Any) -> list[int]:
    response = client.post("/v1/completions", json={**BODY, "model": model, **more})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def expected(llm: LLM, lora: LoRARequest | None, prompt: str = PROMPTS[0]) -> list[int]:
    return list(llm.generate(prompt, GREEDY, lora_request=lora)[0].outputs[0].token_ids)


def test_requests_at_once_get_the_tokens_of_the_model_that_each_names(
    server: LiveServer, llm: LLM, folders: dict[str, Path]
) -> None:
    async def ask(client: openai.AsyncOpenAI, name: str, prompt: str, streams: bool) -> list[int]:
        extra = {"ignore_eos": True, "return_token_ids": True}
        asked: dict[str, Any] = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": extra}
        if not streams:
            completion: Any = await client.completions.create(model=name, **asked)
            assert completion.model == name
            return list(completion.choices[0].token_ids)
        found: list[int] = []
        async for chunk in await client.completions.create(model=name, stream=True, **asked):
            found += chunk.choices[0].token_ids or [] if chunk.choices else []
        return found

    async def ask_all(cases: list[tuple[str, str, bool]]) -> list[list[int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, *case) for case in cases))

    names = ("base", *folders)
    cases = [(name, prompt, streams) for prompt in PROMPTS for name in names for streams in (False, True)]
    adapters = {name: LoRARequest(name, 0, str(folder)) for name, folder in folders.items()}
    wanted = [expected(llm, adapters.get(name), prompt) for name, prompt, _ in cases]
    assert asyncio.run(ask_all(cases)) == wanted
    assert len({tuple(tokens) for tokens in wanted[: 2 * len(names)]}) == len(names), "each answers otherwise"


@pytest.mark.parametrize("name", ["base", "pirate"])
def test_every_endpoint_that_generates_takes_the_adapter(
    server: LiveServer, llm: LLM, folders: dict[str, Path], name: str
) -> None:
    lora = LoRARequest(name, 0, str(folders[name])) if name in folders else None
    text = llm.chat(MESSAGES, GREEDY, use_tqdm=False, lora_request=lora)[0].outputs[0].text
    options: dict[str, Any] = {"extra_body": {"temperature": 0, "ignore_eos": True}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=NUM_TOKENS, **options)
        response = client.responses.create(model=name, input="Hello there", max_output_tokens=NUM_TOKENS, **options)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model=name, messages=MESSAGES, max_tokens=NUM_TOKENS, **options)
    assert {chat.model, response.model, message.model} == {name}
    said = [chat.choices[0].message.content, response.output_text, message.content[0].text]
    assert said == [text] * 3


def test_models_lists_adapters_with_their_parents(client: httpx.Client, folders: dict[str, Path]) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert list(cards) == ["base", "other", "pirate", "poet"]
    assert cards["base"]["parent"] is None
    poet = client.get("/v1/models/poet").json()
    assert poet == cards["poet"]
    assert (poet["root"], poet["parent"], poet["object"]) == (str(folders["poet"]), "base", "model")


def test_the_playground_offers_adapters(engine: AsyncLLMEngine) -> None:
    with live_server(engine, {"page": (PlaygroundRoute, PlaygroundRoute.Options())}, model_names=("base",)) as live:
        assert httpx.get(f"{live.url}/playground/facts", timeout=60).json()["models"] == ["base", "pirate", "poet"]


def test_a_parent_of_the_config_is_shown(engine: AsyncLLMEngine, client: httpx.Client) -> None:
    routes = {"models": (ModelsRoute, ModelsRoute.Options.model_validate({"parents": {"poet": "org/base"}}))}
    with live_server(engine, routes, model_names=("base",)) as live:
        cards = httpx.get(f"{live.url}/v1/models", timeout=60).json()["data"]
    assert {card["id"]: card["parent"] for card in cards} == {"base": None, "pirate": "base", "poet": "org/base"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/completions", BODY),
        ("v1/chat/completions", {"messages": MESSAGES}),
        ("v1/responses", {"input": "Hello"}),
        ("v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("v1/messages/count_tokens", {"messages": MESSAGES}),
        ("v1/explain/completions", {"prompt": "Hello"}),
        ("tokenize", {"prompt": "Hello"}),
    ],
)
def test_an_unknown_name_is_told_what_there_is(
    client: httpx.Client, check_error: CheckError, path: str, body: dict[str, Any]
) -> None:
    error = check_error(client.post(f"/{path}", json={**body, "model": "pirat"}), 404)
    assert error["message"] == "the model 'pirat' is not served here, but base, other, pirate, poet"
    assert client.post(f"/{path}", json={**body, "model": "pirate"}).status_code == 200
    check_error(client.get("/v1/models/pirat"), 404)


def test_explain_names_the_adapter(client: httpx.Client) -> None:
    for model, name in (("poet", "poet"), ("base", None)):
        body = {**BODY, "model": model}
        assert client.post("/v1/explain/completions", json=body).json()["adapter"]["name"] == name
        answer = client.post("/v1/completions", json=body).json()
        [told] = client.get(f"/v1/explain/{answer['id']}").json()["requests"]
        assert told["adapter"]["name"] == name


def test_an_adapter_comes_and_goes_while_the_server_runs(
    client: httpx.Client, llm: LLM, model: Path, tmp_path: Path, change: Change, check_error: CheckError
) -> None:
    folder = save_adapter(tmp_path / "new", model, seed=7)
    check_error(client.post("/v1/completions", json={**BODY, "model": "new"}), 404)
    loaded = change("load", lora_name="new", lora_path=str(folder))
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert token_ids(client, "new") == expected(llm, LoRARequest("new", 0, str(folder))) != token_ids(client, "base")
    assert client.get("/v1/models/new").json()["root"] == str(folder)
    unloaded = change("unload", lora_name="new")
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    error = check_error(client.post("/v1/completions", json={**BODY, "model": "new"}), 404, param="model")
    assert (error["code"], error["type"]) == ("model_not_found", "not_found_error")
    check_error(client.get("/v1/models/new"), 404)


def test_a_name_that_is_loaded_anew_answers_by_its_new_weights(
    client: httpx.Client, llm: LLM, model: Path, tmp_path: Path, change: Change
) -> None:
    answers = []
    for seed in (11, 12):
        folder = save_adapter(tmp_path / "same", model, seed=seed)
        assert change("load", lora_name="same", lora_path=str(folder)).status_code == 200
        answers.append([token_ids(client, "same") for _ in range(2)])  # the second finds the first's prefix
        llm.add_lora(LoRARequest("same", 0, str(folder)))
        assert answers[-1] == [expected(llm, LoRARequest("same"))] * 2
        llm.remove_lora("same")
        assert change("unload", lora_name="same").status_code == 200
    assert answers[0] != answers[1]


def test_an_adapter_in_use_stays(
    engine: AsyncLLMEngine, client: httpx.Client, model: Path, tmp_path: Path, change: Change, check_error: CheckError
) -> None:
    folder = save_adapter(tmp_path / "busy", model, seed=5)
    assert change("load", lora_name="busy", lora_path=str(folder)).status_code == 200
    watched = WatchedEngine(engine)
    watched.script = Script(num_outputs=0)  # the request is held
    completions: tuple[type[Route], PluginOptions] = (CompletionsRoute, CompletionsRoute.Options())
    routes = {"completions": completions, "lora": ALLOWED}
    with live_server(watched, routes, model_names=("base",)) as live:

        async def unload_while_it_runs() -> None:
            async with httpx.AsyncClient(base_url=live.url, timeout=60) as asking:
                running = asyncio.create_task(asking.post("/v1/completions", json={**BODY, "model": "busy"}))
                await asyncio.to_thread(watched.is_waiting.wait, 60)
                refusal = await asking.post("/v1/unload_lora_adapter", json={"lora_name": "busy"})
                assert "used by 1 request" in check_error(refusal, 409)["message"]
                running.cancel()

        asyncio.run(unload_while_it_runs())
        wait_until(lambda: change("unload", lora_name="busy").status_code == 200, "its request ends")


def test_a_number_names_an_adapter_as_well(
    engine: AsyncLLMEngine, model: Path, tmp_path: Path, change: Change, check_error: CheckError
) -> None:
    folder = save_adapter(tmp_path / "new", model, seed=7)
    assert change("load", lora_name="new", lora_path=str(folder)).status_code == 200
    number = {adapter.name: adapter.int_id for adapter in asyncio.run(engine.list_loras())}["new"]
    error = check_error(change("unload", lora_name="poet", lora_int_id=number), 404)
    assert f"new ({number})" in error["message"]
    assert change("unload", lora_int_id=number).text == "Success: LoRA adapter 'new' removed successfully."


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "bad", "lora_path": "nowhere"}, 404, "nowhere is not there"),
        ({"lora_name": "bad", "lora_path": ""}, 400, "lora_path is empty"),
        ({"lora_name": " ", "lora_path": "good"}, 400, "is no name"),
        ({"lora_name": "bad", "lora_path": "empty"}, 400, "it has no adapter_config.json"),
        ({"lora_name": "bad", "lora_path": "wide"}, 400, "lora.max_rank"),
        ({"lora_name": "bad", "lora_path": "dora"}, 400, "DoRA"),
        ({"lora_name": "bad", "lora_path": "foreign"}, 400, "cannot be loaded"),
        ({"lora_name": "base", "lora_path": "good"}, 409, "that of the model itself"),
        ({"lora_name": "poet", "lora_path": "good"}, 409, "loaded already"),
        ({"lora_name": "bad"}, 400, "lora_path"),
        ({"lora_name": "bad", "lora_path": 5}, 400, "lora_path"),
        ({"lora_name": "bad", "lora_path": "good", "load_inplace": True}, 400, "unknown field 'load_inplace'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    client: httpx.Client,
    model: Path,
    tmp_path: Path,
    change: Change,
    check_error: CheckError,
    body: dict[str, Any],
    status: int,
    message: str,
) -> None:
    save_adapter(tmp_path / "good", model, seed=1)
    save_adapter(tmp_path / "wide", model, seed=1, rank=16)
    save_adapter(tmp_path / "dora", model, seed=1, use_dora=True)
    (tmp_path / "empty").mkdir()
    save_tiny_model(tmp_path / "other-model", tiny_config("llama", hidden_size=32))
    save_adapter(tmp_path / "foreign", tmp_path / "other-model", seed=1)
    if isinstance(body.get("lora_path"), str) and body["lora_path"]:
        body = {**body, "lora_path": str(tmp_path / body["lora_path"])}
    error = check_error(change("load", **body), status)
    assert message in error["message"], error
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["base", "other", "pirate", "poet"]
    assert token_ids(client, "pirate"), "the others go on"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"lora_name": "nobody"}, 404, "no adapter has lora_name 'nobody'; loaded are: pirate (1), poet (2)"),
        ({"lora_int_id": 77}, 404, "no adapter has lora_int_id 77"),
        ({"lora_name": "base"}, 404, "no adapter has lora_name 'base'"),
        ({}, 400, "give lora_name"),
        ({"lora_int_id": "one"}, 400, "lora_int_id"),
    ],
)
def test_what_cannot_be_unloaded_is_refused_with_the_reason(
    change: Change, check_error: CheckError, body: dict[str, Any], status: int, message: str
) -> None:
    assert message in check_error(change("unload", **body), status)["message"]


def test_a_server_changes_its_adapters_only_where_it_is_told_so(
    engine: AsyncLLMEngine, folders: dict[str, Path], check_error: CheckError
) -> None:
    with live_server(engine, {"lora": (LoRARoute, LoRARoute.Options())}, model_names=("base",)) as live:
        load = httpx.post(f"{live.url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "b"}, timeout=60)
        unload = httpx.post(f"{live.url}/v1/unload_lora_adapter", json={"lora_name": "poet"}, timeout=60)
    for response in (load, unload):
        error = check_error(response, 403)
        assert "server.routes.lora.allow_updates" in error["message"]
        assert error["type"] == "permission_error"
    assert {adapter.name for adapter in asyncio.run(engine.list_loras())} == set(folders)


def test_metrics_have_the_adapters(engine: AsyncLLMEngine, client: httpx.Client) -> None:
    def info() -> str:
        return next(line for line in client.get("/metrics").text.splitlines() if line.startswith("vllm:lora_requests"))

    assert 'max_lora="2",waiting_lora_adapters="",running_lora_adapters=""' in info()

    async def held() -> None:
        await engine.pause("keep")  # a hold could come after the last token
        try:
            with closing(await engine.submit(PROMPTS[0], GREEDY, lora_request=LoRARequest("poet"))):
                assert '_lora_adapters="poet"' in info()
        finally:
            await engine.resume()

    asyncio.run(held())
    token_ids(client, "pirate")
    assert 'adapter="pirate"' in client.get("/metrics").text
