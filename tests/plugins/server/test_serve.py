"""`dovetail serve`: real processes that are asked over HTTP, killed and told to end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from operator import mul
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dovetail import LLM, SamplingParams
from dovetail.spec_decode.experiments.live.records import read_live
from dovetail.testing.tiny_adapters import save_adapter
from tests.ports import free_ports
from tests.waiting import wait_until

COMPLETE = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
LONG = {**COMPLETE, "max_tokens": 200, "ignore_eos": True, "stream": True}


class Served:
    """A server that was started from the command line."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path):
        self.process = process
        self.url = url
        self.log = log

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def children(self, what: str) -> list[psutil.Process]:
        """Processes that run this module."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has ended
                if any(what in part for part in process.cmdline()):
                    found.append(process)
        return found


def write_config(model: Path, directory: Path) -> tuple[Path, int]:
    """A config file, and the port in it."""
    port = free_ports()
    config = {
        "model": {"path": str(model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 600},
        "executor": {"threads": 1},
        "server": {"port": port, "served_model_name": ["story"]},
    }
    file = directory / "engine.json"
    file.write_text(json.dumps(config))
    return file, port


@contextmanager
def serving(model: Path, directory: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    """The server leads a process group, as it does when a shell starts it."""
    file, port = write_config(model, directory)
    log = directory / "serve.log"
    command = [sys.executable, "-m", "dovetail", "serve", str(file), *arguments]
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stderr=output, text=True, start_new_session=True, env={**os.environ, **environment}
        ) as process,
    ):
        served = Served(process, f"http://127.0.0.1:{port}", log)
        try:
            wait_until(lambda: served.is_ready() or process.poll() is not None, "the server is ready", 300)
            assert process.poll() is None, log.read_text()
            yield served
        finally:
            process.kill()


@pytest.fixture(scope="module")
def pirate(story_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter."""
    return save_adapter(tmp_path_factory.mktemp("adapters") / "pirate", story_model, seed=1)


@pytest.fixture(scope="module")
def served(
    story_model: Path, pirate: Path, holding_site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    directory, path = tmp_path_factory.mktemp("serve"), os.pathsep.join([str(holding_site), *sys.path])
    parent = {"name": "named", "path": str(pirate), "base_model_name": "org/story"}
    adapters = ("--enable-lora", "--lora-modules", f"pirate={pirate}", json.dumps(parent))
    options = (
        *("-o", "server.api_server_count=2", "-o", "server.routes.lora.allow_updates=true"),
        *("-o", "telemetry=[prometheus, holding]"),
        *("-o", "weight_transport=disk", "-o", "server.routes.weights.allow_updates=true"),
    )
    with serving(story_model, directory, *adapters, *options, PYTHONPATH=path) as started:
        yield started


def read_stream(served: Served, body: dict[str, Any], runs: threading.Event | None = None) -> str:
    """The text of a stream; raises where it breaks off. `runs` is set when the stream's first text is there."""
    text = ""
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["text"]
                if runs is not None:
                    runs.set()
            if line == "data: [DONE]":
                return text
    raise ConnectionError("the stream broke off")


def begin_streams(pool: ThreadPoolExecutor, served: Served, body: dict[str, Any], count: int = 1) -> list[Future[str]]:
    """Streams that `read_stream` reads, all of which run."""
    run = [threading.Event() for _ in range(count)]
    streams = [pool.submit(read_stream, served, body, runs) for runs in run]
    for runs in run:
        assert runs.wait(60), "a stream does not begin"
    return streams


def test_two_api_processes_serve_one_engine_and_one_truth(served: Served) -> None:
    assert len(served.children("api_process")) == 2
    assert len(served.children("engine_process")) == 1
    before = metric(served, "vllm:generation_tokens_total")
    texts = {served.post(COMPLETE).json()["choices"][0]["text"] for _ in range(8)}
    assert len(texts) == 1
    assert metric(served, "vllm:generation_tokens_total") == before + 64


def test_an_engine_in_its_own_process_embeds_for_all_api_processes(served: Served) -> None:
    before = metric(served, "vllm:prompt_tokens_total")
    texts = ["Once upon a time", "there was"]
    answers = [httpx.post(f"{served.url}/v1/embeddings", json={"input": texts}, timeout=60).json() for _ in range(8)]
    first, second = (one["embedding"] for one in answers[0]["data"])
    assert all([one["embedding"] for one in each["data"]] == [first, second] for each in answers)
    read = sum(each["usage"]["prompt_tokens"] for each in answers)
    assert metric(served, "vllm:prompt_tokens_total") == before + read
    pair = {"text_1": texts[0], "text_2": texts[1]}
    (score,) = httpx.post(f"{served.url}/score", json=pair, timeout=60).json()["data"]
    assert score["score"] == pytest.approx(sum(map(mul, first, second)), abs=1e-6)


def test_adapters_of_the_command_line_are_models(served: Served, pirate: Path) -> None:
    cards = httpx.get(f"{served.url}/v1/models", timeout=60).json()["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards[1:]]
    assert shown == [("pirate", str(pirate), "story"), ("named", str(pirate), "org/story")]
    texts = [served.post({**COMPLETE, "model": name}).json()["choices"][0]["text"] for name in ("pirate", "named")]
    assert texts[0] == texts[1] != served.post(COMPLETE).json()["choices"][0]["text"]


def test_an_adapter_that_one_api_process_loads_the_other_serves(
    served: Served, story_model: Path, tmp_path: Path
) -> None:
    one, other = served.children("api_process")
    body = {"lora_name": "late", "lora_path": str(save_adapter(tmp_path / "late", story_model, seed=2))}
    with stopped(other):
        assert served.post({**COMPLETE, "model": "late"}).status_code == 404
        assert httpx.post(f"{served.url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    with stopped(one):
        assert served.post({**COMPLETE, "model": "late"}).json()["model"] == "late"
    with stopped(other):
        unloaded = httpx.post(f"{served.url}/v1/unload_lora_adapter", json={"lora_name": "late"}, timeout=60)
        assert unloaded.status_code == 200
    with stopped(one):  # it has seen the name, and asks the engine
        assert served.post({**COMPLETE, "model": "late"}).status_code == 404


def update(served: Served, checkpoint: Path) -> dict[str, Any]:
    """A whole update; what the server says of it."""
    bodies: list[tuple[str, Any]] = [
        ("init_weight_transfer_engine", {"init_info": {}}),
        ("start_weight_update", None),
        ("update_weights", {"update_info": {"path": str(checkpoint)}}),
        ("finish_weight_update", None),
    ]
    for phase, body in bodies:
        response = httpx.post(f"{served.url}/{phase}", json=body, timeout=60)
        assert response.status_code == 200, response.text
    report: dict[str, Any] = response.json()
    return report


def test_weights_that_one_api_process_brings_all_serve(
    served: Served, story_model: Path, reversed_model: Path, tmp_path: Path
) -> None:
    one, other = served.children("api_process")
    before = served.post(COMPLETE).json()["choices"][0]["text"]
    with stopped(other):
        brought = update(served, reversed_model)
        missing = {"update_info": {"path": str(tmp_path / "nothing")}}
        conflict = httpx.post(f"{served.url}/update_weights", json=missing, timeout=60)
        assert conflict.status_code == 409
        assert httpx.post(f"{served.url}/start_weight_update", timeout=60).status_code == 200
        refusal = httpx.post(f"{served.url}/update_weights", json=missing, timeout=60)
        assert refusal.status_code == 400
        assert "the old weights serve on" in refusal.json()["error"]["message"]
    with stopped(one):
        found = httpx.get(f"{served.url}/weight_info", timeout=60).json()
        assert found == {key: brought[key] for key in ("weight_version", "weight_checksum")}
        text = served.post(COMPLETE).json()["choices"][0]["text"]
    model = {"path": str(reversed_model), "dtype": "float32", "max_model_len": 256}
    with LLM(model=model, cache={"block_size": 4, "num_blocks": 100}, executor={"threads": 1}) as llm:
        (fresh,) = llm.generate([COMPLETE["prompt"]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert text == fresh.outputs[0].text != before
    update(served, story_model)
    assert served.post(COMPLETE).json()["choices"][0]["text"] == before


def test_what_ran_in_one_api_process_the_other_explains(served: Served) -> None:
    one, other = served.children("api_process")
    with stopped(one):
        response = served.post({**COMPLETE, "prompt": ["Once", "Once upon a time"], "request_id": "told"}).json()
    with stopped(other):
        told = httpx.get(f"{served.url}/v1/explain/{response['id']}", timeout=60).json()
    assert sum(each["prompt"]["tokens"] for each in told["requests"]) == response["usage"]["prompt_tokens"]
    assert {each["state"] for each in told["requests"]} == {"finished"}


@contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """The process does nothing meanwhile, so that another one accepts what comes."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def metric(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))


def test_an_api_process_that_is_killed_loses_its_own_streams_only(served: Served) -> None:
    whole = read_stream(served, LONG)
    with ThreadPoolExecutor(8) as pool:
        streams = begin_streams(pool, served, LONG, count=8)
        served.children("api_process")[0].kill()
        ended = [stream.exception() for stream in streams]
    survivors = [stream.result() for stream, error in zip(streams, ended, strict=True) if error is None]
    assert set(survivors) <= {whole}
    wait_until(lambda: len(served.children("api_process")) == 2, "another took over")
    wait_until(lambda: metric(served, "vllm:kv_cache_usage_perc") == 0, "no block is held")
    assert read_stream(served, LONG) == whole


def test_an_engine_that_is_killed_comes_back(served: Served) -> None:
    text = served.post(COMPLETE).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        (stream,) = begin_streams(pool, served, {**LONG, "request_id": "held-begun"})
        (engine,) = served.children("engine_process")
        engine.kill()
        assert stream.exception() is not None
    response = served.post(COMPLETE)
    if response.status_code != 200:  # the next engine may be there already
        assert response.status_code == 503
        assert "retry-after" in response.headers
        assert response.json()["error"]["type"] == "overloaded_error"
    wait_until(served.is_ready, "the next engine serves", 300)
    assert served.post(COMPLETE).json()["choices"][0]["text"] == text


def test_a_worker_that_hangs_is_no_healthy_engine(story_model: Path, tmp_path: Path) -> None:
    def step_takes_too_long() -> bool:
        health = httpx.get(f"{served.url}/health", timeout=60)
        return health.status_code == 503 and "one step has taken" in health.json()["error"]["message"]

    options = ("-o", "executor.name=multiproc", "-o", "server.unhealthy_after_s=0.5")
    with serving(story_model, tmp_path, *options) as served, ThreadPoolExecutor(1) as pool:
        (engine,) = served.children("engine_process")
        workers = engine.children()
        assert workers
        with ExitStack() as hung:
            for worker in workers:
                hung.enter_context(stopped(worker))
            answer = pool.submit(served.post, COMPLETE)
            wait_until(step_takes_too_long, "the engine is not healthy")
            wait_until(lambda: not served.is_ready(), "the engine is not ready")
        assert answer.result().status_code == 200
        wait_until(served.is_ready, "the engine is healthy again")


def send_to_supervisor(processes: list[psutil.Process]) -> None:
    """As `kill` does."""
    processes[0].send_signal(signal.SIGTERM)


def send_to_group(processes: list[psutil.Process]) -> None:
    """As a terminal does for Ctrl-C."""
    os.killpg(processes[0].pid, signal.SIGINT)


def send_to_all(processes: list[psutil.Process]) -> None:
    """As systemd does."""
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "send",
    [
        send_to_supervisor,
        pytest.param(send_to_group, marks=pytest.mark.nightly),
        pytest.param(send_to_all, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_end_lets_streams_finish(
    send: Callable[[list[psutil.Process]], None], story_model: Path, tmp_path: Path
) -> None:
    with serving(story_model, tmp_path) as served, ThreadPoolExecutor(1) as pool:
        whole = read_stream(served, LONG)
        (stream,) = begin_streams(pool, served, LONG)
        supervisor = psutil.Process(served.process.pid)
        processes = [supervisor, *supervisor.children()]
        everything = [process.pid for process in processes]
        send(processes)
        assert stream.result() == whole
        assert served.process.wait(60) == 0
        assert not any(psutil.pid_exists(pid) for pid in everything)


def test_a_second_signal_ends_also_an_engine_that_hangs(story_model: Path, tmp_path: Path) -> None:
    with serving(story_model, tmp_path) as served:
        children = psutil.Process(served.process.pid).children()
        (engine,) = served.children("engine_process")
        (api,) = served.children("api_process")
        engine.suspend()
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not api.is_running(), "all but the engine has ended")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 1, "it was not the patience with the engine that ended"
        assert not any(child.is_running() for child in children)


def test_the_socket_of_a_server_that_ended_is_removed(story_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    file, _ = write_config(story_model, tmp_path)
    command = [sys.executable, "-m", "dovetail", "serve", str(file), "-o", f"server.uds={path}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("serving") for line in process.stderr)
        assert path.is_socket()
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not path.exists()


def test_files_of_the_working_folder_stand_for_no_library(story_model: Path, tmp_path: Path) -> None:
    file, _ = write_config(story_model, tmp_path)
    for name in ("http", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')")
    # -P: as the installed command starts.
    command = [sys.executable, "-P", "-m", "dovetail", "serve", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if line.startswith("serving"):
                process.terminate()
    assert process.returncode == 0, said


def test_nothing_outlives_a_server_that_is_killed(story_model: Path, tmp_path: Path) -> None:
    with serving(story_model, tmp_path) as served:
        children = psutil.Process(served.process.pid).children()
        served.children("engine_process")[0].suspend()
        os.kill(served.process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-folder/model"], "no-such-folder"),
        (["--model", "a", "b"], "two models are given"),
        (["none.yaml"], "none.yaml"),
        (["./model", "--enable-lora", "--lora-modules", "a"], "--lora-modules: 'a' must be NAME=PATH"),
        (["./model", "--enable-lora", "--lora-modules", "./model=a"], "the name of the model itself"),
        (["-o", "server.prot=8000"], "did you mean"),
        (["-o", "server.routes.chatt=chatt"], "there is no route 'chatt'"),
        (["--served-model-name", ""], "--served-model-name"),
        (["-o", "server.served_model_name=[story, '']"], "server.served_model_name"),
        (["-o", "server.cors={allow_origins: ['*'], allow_credentials: true}"], "name the origins"),
    ],
)
def test_what_cannot_be_served_is_one_error(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "serve", *arguments, "-o", "server.port=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode in (1, 2)
    assert message.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr


ROUTES = """
from fastapi import APIRouter
from dovetail.contracts.route import Route

class Broken(Route):
    contract = (1, 0)

    def __init__(self, options, host):
        raise RuntimeError("no such database")

    def router(self):
        return APIRouter()

class Second(Route):
    contract = (1, 0)

    def router(self):
        router = APIRouter()
        router.get("/health")(lambda: None)
        return router
"""


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("server.tls.certfile=/nope.pem", "server.tls.certfile: there is no file /nope.pem"),
        pytest.param("server.tls.certfile=routes.py", "server.tls cannot be used", marks=pytest.mark.nightly),
        pytest.param(
            "server.routes.mine.name=routes.py:Broken", "RuntimeError: no such database", marks=pytest.mark.nightly
        ),
        ("server.routes.mine.name=routes.py:Second", "GET /health is an endpoint of route 'mine' and of"),
    ],
)
def test_what_no_api_process_can_serve_is_one_error_at_the_start(
    option: str, message: str, story_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "routes.py").write_text(ROUTES)
    file, _ = write_config(story_model, tmp_path)
    command = [sys.executable, "-m", "dovetail", "serve", str(file), "-o", option, "-o", "server.api_server_count=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "serving" not in done.stderr, "nothing was served"


@pytest.mark.nightly
def test_an_engine_whose_restart_fails_is_started_again(story_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.symlink_to(story_model)
    patience = "server.restart.max_restarts=1000"  # until the model is back, however slow this machine is
    with serving(model, tmp_path, "-o", patience) as served:
        model.unlink()
        (engine,) = served.children("engine_process")
        engine.kill()
        wait_until(lambda: "did not start again" in served.log.read_text(), "a restart fails", 300)
        answers = [httpx.get(f"{served.url}/{path}", timeout=60) for path in ("health", "ready", "metrics") * 3]
        answers += [served.post(COMPLETE), served.post({**COMPLETE, "stream": True})]
        assert {answer.status_code for answer in answers} == {503}
        assert all("being started again" in answer.json()["error"]["message"] for answer in answers)
        log = served.log.read_text()
        assert log.count("WARNING") == 1, "one line for all requests that the outage fails"
        assert "Traceback" not in log
        model.symlink_to(story_model)
        wait_until(served.is_ready, "the next engine serves", 300)
        assert served.post(COMPLETE).status_code == 200


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "dovetail", "serve", "-o", f"server.port={taken.getsockname()[1]}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "cannot listen" in done.stderr
    assert "loading weights" not in done.stderr


EXPERIMENT = """
{drafts: {unit: user, arms: {plain: {speculation: off}, lookup: {speculation: lookup}}}}
"""


def test_live_traffic_is_split_alike_by_all_api_processes_and_recorded_to_the_last(
    story_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "arms.jsonl"
    arguments = (
        "server.api_server_count=2",
        "speculative={drafters: {lookup: {name: ngram, min_match: 1, length: fixed}}}",
        f"experiments={EXPERIMENT.strip()}",
        f"telemetry=[prometheus, {{name: experiments, path: {file}}}]",
    )
    options = [part for argument in arguments for part in ("-o", argument)]
    with serving(story_model, tmp_path, *options) as served, ThreadPoolExecutor(1) as pool:
        first, second = served.children("api_process")
        for stopped in (first, second):  # the other one answers all
            stopped.suspend()
            for number in range(8):
                name = "user" if number % 2 else "safety_identifier"
                assert served.post({**COMPLETE, name: f"somebody-{number}"}).status_code == 200
            stopped.resume()
        assert served.post(COMPLETE).status_code == 200  # of nobody
        (stream,) = begin_streams(pool, served, {**LONG, "user": "somebody-0"})
        exposition = httpx.get(f"{served.url}/metrics", timeout=60).text
        served.process.send_signal(signal.SIGTERM)
        stream.result()
        assert served.process.wait(60) == 0
    design, *records = map(json.loads, file.read_text().splitlines())
    assert design["event"] == "experiment"
    assert len(records) == 2 * 8 + 1, "each that took part, the one that drained included"
    assert records[-1]["output_tokens"] == LONG["max_tokens"]
    arms: dict[str, list[str]] = {}
    for record in records:
        arms.setdefault(record["unit"], []).append(record["arm"])
    assert sorted(map(len, arms.values())) == [2] * 7 + [3]
    assert all(len(set(own)) == 1 for own in arms.values())
    assert {arm for own in arms.values() for arm in own} == {"plain", "lookup"}
    assert 'experiment="drafts",arm="lookup"' in exposition
    assert "somebody" not in file.read_text() + exposition
    assert len(read_live(file, "drafts").records) == len(records), "`dovetail ab live` reads it"
