"""A trainer gives an engine behind a server new weights by vLLM's endpoints; what is wrong leaves the old ones."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from dovetail import LLM, AsyncLLMEngine, SamplingParams
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.pause import PauseRoute
from dovetail.plugins.routes.weights import WeightsRoute
from dovetail.plugins.server.live import live_server
from dovetail.rl.weight_sender import WeightSender
from dovetail.testing.watched_engine import Script, WatchedEngine
from tests.waiting import wait_until

PROMPT = "Once upon a time"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Stage:
    """A server, and the weights for its model."""

    client: httpx.Client
    engine: WatchedEngine
    weights: Mapping[str, torch.Tensor]
    tokens: list[int]
    """What an engine that starts with them makes of `BODY`."""

    def version(self) -> int:
        found: int = self.client.get("/weight_info").json()["weight_version"]
        return found


@pytest.fixture(scope="module")
def stage(story_model: Path, reversed_model: Path) -> Iterator[Stage]:
    sections: dict[str, Any] = {"cache": {"block_size": 4, "num_blocks": 100}, "executor": {"threads": 1}}
    model = {"dtype": "float32", "max_model_len": 256}
    params = SamplingParams(temperature=0, max_tokens=BODY["max_tokens"], ignore_eos=True)
    with LLM(model={"path": str(reversed_model), **model}, **sections) as llm:
        (expected,) = llm.generate([PROMPT], params, use_tqdm=False)
    routes: dict[str, tuple[type[Route], PluginOptions]] = {
        "completions": (CompletionsRoute, CompletionsRoute.Options()),
        "pause": (PauseRoute, PauseRoute.Options.model_validate({"allow_control": True})),
        "weights": (WeightsRoute, WeightsRoute.Options.model_validate({"allow_updates": True})),
    }
    config = {"model": {"path": str(story_model), **model}, "weight_transport": "ipc", **sections}
    with AsyncLLMEngine.from_config(config) as engine:
        watched = WatchedEngine(engine)
        with (
            live_server(watched, routes, model_names=("story",)) as live,
            httpx.Client(base_url=live.url, timeout=60) as client,
        ):
            weights = load_file(reversed_model / "model.safetensors")
            yield Stage(client, watched, weights, list(expected.outputs[0].token_ids))


def tokens(client: httpx.Client) -> list[int]:
    response = client.post("/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def send(client: httpx.Client, weights: Mapping[str, torch.Tensor], **start: Any) -> httpx.Response:
    """A whole update as a trainer makes it; the answer of its last phase."""
    with WeightSender() as sender:
        answer(client.post("/init_weight_transfer_engine", json={"init_info": sender.init_info()}))
        answer(client.post("/start_weight_update", json=start) if start else client.post("/start_weight_update"))
        for update_info in sender.send(weights.items(), bucket_bytes=64 << 10):
            answer(client.post("/update_weights", json={"update_info": update_info}))
        return client.post("/finish_weight_update")


def test_a_trainer_sends_a_checkpoint(stage: Stage) -> None:
    client = stage.client
    before = tokens(client)
    assert answer(client.get("/get_world_size")) == {"world_size": 1}
    assert refused(client.post("/start_weight_update"))[0] == 409  # nobody is connected
    report = answer(send(client, stage.weights, weight_version=5))
    assert report["weight_version"] == 5
    assert len(report["weight_checksum"]) == 32
    assert answer(client.get("/weight_info")) == {key: report[key] for key in ("weight_version", "weight_checksum")}
    assert tokens(client) == stage.tokens != before
    assert answer(send(client, stage.weights))["weight_checksum"] == report["weight_checksum"]


def test_phases_out_of_order_are_conflicts(stage: Stage) -> None:
    client, version = stage.client, stage.version()
    with WeightSender() as sender:
        info = {"init_info": sender.init_info()}
        answer(client.post("/init_weight_transfer_engine", json=info))
        for path, body in (("/update_weights", {"update_info": {}}), ("/finish_weight_update", None)):
            status, text = refused(client.post(path, json=body))
            assert (status, "call start_weight_update first" in text) == (409, True)
        status, text = refused(client.post("/start_weight_update", json={"weight_version": version}))
        assert (status, "versions never go back" in text) == (409, True)
        started = answer(client.post("/start_weight_update"))
        assert (started["next_weight_version"], started["weight_version"]) == (version + 1, version)
        assert refused(client.post("/start_weight_update"))[0] == 409
        assert refused(client.post("/init_weight_transfer_engine", json=info))[0] == 409
        assert answer(client.post("/abort_weight_update"))["weight_version"] == version
        assert refused(client.post("/finish_weight_update"))[0] == 409


def test_what_runs_must_be_paused(stage: Stage) -> None:
    client, started = stage.client, threading.Event()

    def read() -> None:
        body = {**BODY, "max_tokens": 100, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                started.set()
                if stop.is_set():
                    break

    stop = threading.Event()
    answer(send(client, stage.weights))
    stage.engine.script = Script(num_outputs=1)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert stage.engine.is_waiting.wait(60)
        stage.engine.script = Script()
        status, text = refused(client.post("/start_weight_update"))
        assert (status, "no pause holds" in text) == (409, True)
        client.post("/pause", params={"mode": "keep"})
        answer(client.post("/start_weight_update"))
        answer(client.post("/abort_weight_update"))
        client.post("/pause", params={"mode": "abort"})
        reading.result(timeout=60)
    client.post("/resume")
    wait_until(lambda: stage.engine.num_open == 0, "the stream has ended")


def test_weights_that_sleep_wake_up_for_an_update(stage: Stage) -> None:
    client = stage.client
    answer(send(client, stage.weights))
    assert client.post("/sleep", params={"level": 2}).status_code == 200
    status, text = refused(client.post("/start_weight_update"))
    assert (status, "call wake_up first" in text) == (409, True)
    assert client.post("/wake_up", params={"for_update": True}).status_code == 200
    some = {name: tensor for name, tensor in stage.weights.items() if name != NORM}
    status, text = refused(send(client, some))
    assert (status, "Invalid now: weights" in text) == (400, True)
    assert refused(client.post("/v1/completions", json=BODY))[0] == 409
    answer(send(client, stage.weights))
    assert client.post("/wake_up").status_code == 200
    assert tokens(client) == stage.tokens


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, rf"missing \(1\).*{NORM} \[64\]"),
        (torch.zeros(65), rf"{NORM} has shape \[65\], the config implies \[64\]"),
        (torch.zeros(64, dtype=torch.int64), "dtype_names has int64"),
    ],
    ids=("missing", "shape", "dtype"),
)
def test_weights_that_do_not_fit_leave_the_old_ones(stage: Stage, tensor: torch.Tensor | None, words: str) -> None:
    client = stage.client
    answer(send(client, stage.weights))
    version = stage.version()
    others = {name: torch.zeros_like(one) for name, one in stage.weights.items() if name != NORM}
    with pytest.raises(AssertionError, match=words):
        answer(send(client, others if tensor is None else {**others, NORM: tensor}))
    assert refused(client.post("/finish_weight_update"))[0] == 409  # the update has ended
    assert stage.version() == version
    assert tokens(client) == stage.tokens


def test_old_weights_serve_on_when_the_sender_is_gone(stage: Stage) -> None:
    client = stage.client
    answer(send(client, stage.weights))
    bucket = {"names": [NORM], "dtype_names": ["float32"], "shapes": [[64]], "bucket": 1}
    with WeightSender() as sender, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as trainer:
        info = {**sender.init_info(), "pid": trainer.pid}
        answer(client.post("/init_weight_transfer_engine", json={"init_info": info}))
        answer(client.post("/start_weight_update"))
        trainer.kill()
        status, text = refused(client.post("/update_weights", json={"update_info": bucket}))
        assert (status, "is gone" in text, "the old weights serve on" in text) == (400, True, True)
    status, text = refused(client.post("/init_weight_transfer_engine", json={"init_info": info}))
    assert (status, "nobody listens" in text) == (400, True)
    assert tokens(client) == stage.tokens


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/init_weight_transfer_engine", {"init_info": []}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"address": 3}}, "init_info"),
        ("/init_weight_transfer_engine", {"backend": "nccl"}, "unknown field 'backend'"),
        ("/start_weight_update", {"weight_version": "3"}, "weight_version"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format=False"),
        ("/update_weights", {}, "missing required field `update_info`"),
        ("/update_weights", {"update_info": {"names": "x"}}, "update_info"),
        ("/update_weights", {"update_info": {}, "drafter": "heads"}, "there is no drafter 'heads'"),
        ("/finish_weight_update", {"weight_version": "7"}, "/start_weight_update takes the weight_version"),
    ],
)
def test_what_means_nothing_is_a_bad_request(stage: Stage, path: str, body: dict[str, Any], words: str) -> None:
    client, version = stage.client, stage.version()
    if path in ("/update_weights", "/finish_weight_update"):
        with WeightSender() as sender:
            answer(client.post("/init_weight_transfer_engine", json={"init_info": sender.init_info()}))
        answer(client.post("/start_weight_update"))
    status, text = refused(client.post(path, json=body))
    assert status == 400
    assert words in text
    answer(client.post("/abort_weight_update"))
    assert stage.version() == version


def test_clients_may_not_unless_the_config_says_so(engine: AsyncLLMEngine) -> None:
    with live_server(engine, {"weights": (WeightsRoute, WeightsRoute.Options())}, model_names=("story",)) as live:
        for phase in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            status, text = refused(httpx.post(f"{live.url}/{phase}", json={}, timeout=60))
            assert (status, "server.routes.weights.allow_updates: true" in text) == (403, True)
        assert refused(httpx.post(f"{live.url}/abort_weight_update", timeout=60))[0] == 403
        assert httpx.get(f"{live.url}/weight_info", timeout=60).json() == {"weight_version": 0, "weight_checksum": ""}
