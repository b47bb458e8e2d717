"""The `ray` executor, and replicas of Ray Serve, over two raylets on this machine. `make test-ray` installs Ray for
these."""

from __future__ import annotations

import gc
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import PluginError, WorkerError
from dovetail.contracts.executor import ExecutorNeed
from dovetail.executors.ray import RayExecutor, RayOptions
from dovetail.plugins.server.ray_serve import app
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.testing.toy_worker import ToySpec, toy_plan

pytestmark = [
    pytest.mark.ray,
    # Of Ray's own sockets and files.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all processes of the cluster make theirs, but for Ray's own."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", tempfile.gettempdir())
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.fixture(scope="module")
def cluster(temporary_files: Path) -> Iterator[Any]:
    """Two raylets with two CPUs each; this process is connected to them."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    made.add_node(num_cpus=2)
    ray.init(address=made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def create_two_stages() -> RayExecutor:
    """With two ranks each. A raylet has the CPUs for all four."""
    need = ExecutorNeed("cpu", tensor_parallel=2, pipeline_parallel=2)
    return RayExecutor(RayOptions(num_cpus=0.5), ToySpec(), need)


def create(**options: Any) -> RayExecutor:
    chosen = RayOptions(nodes=2, strategy="STRICT_SPREAD", **options)
    return RayExecutor(chosen, ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


def with_parents(pids: list[int]) -> list[psutil.Process]:
    """Ranks, their agents, and the actors of these."""
    ranks = [psutil.Process(pid) for pid in pids]
    agents = [rank.parent() for rank in ranks]
    actors = [agent.parent() for agent in agents if agent is not None]
    return [process for process in (*ranks, *agents, *actors) if process is not None]


def run_steps(executor: RayExecutor) -> None:
    for step_id in range(1_000_000):
        executor.execute(toy_plan(step_id)).result(timeout=60)


def tokens_of(model: Path, prompts: list[list[int]], **executor: Any) -> list[list[int]]:
    config = {"path": str(model), "tokenizer_mode": "none", "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(model=config, cache={"num_blocks": 60}, executor={"threads": 1, **executor}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.usefixtures("cluster")
def test_an_engine_over_two_raylets_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    prompts = [[7, 8, 9, 7, 8, 9], [100, 4, 33]]
    over_ray = tokens_of(tmp_path, prompts, name="ray", num_cpus=0.5, tensor_parallel=2, pipeline_parallel=2)
    assert over_ray == tokens_of(tmp_path, prompts, name="cpu")


@pytest.mark.usefixtures("cluster")
def test_a_shutdown_leaves_neither_processes_nor_files_nor_reservations(temporary_files: Path) -> None:
    import ray

    free = ray.available_resources()["CPU"]
    executor = create()
    executor.start()
    processes = with_parents(executor.call("pid"))
    assert len(processes) == 6
    executor.shutdown()
    assert all_end(processes)
    assert ray.cluster_resources()["CPU"] == free == 4
    assert not list(temporary_files.glob("dovetail-*"))


@pytest.mark.usefixtures("cluster")
def test_an_executor_that_is_dropped_gives_back_what_it_reserved() -> None:
    import ray

    executor = create()
    with closing(executor.open()):
        groups = ray.util.placement_group_table().values()
        assert sum(one["state"] == "CREATED" for one in groups) == 1
        del executor
        gc.collect()
        assert {one["state"] for one in ray.util.placement_group_table().values()} == {"REMOVED"}


def test_another_cluster_than_the_one_connected_to_is_refused(cluster: Any) -> None:
    why = rf"executor\.address is 127\.0\.0\.1:1, and .* cluster at {re.escape(cluster.address)} already"
    with pytest.raises(PluginError, match=why):
        create(address="127.0.0.1:1").start()


@pytest.mark.usefixtures("cluster")
def test_a_tensor_parallel_group_that_fits_no_raylet_is_explained() -> None:
    with pytest.raises(WorkerError, match=r"no place for 2 nodes with .*none of which holds that: .*split over nodes"):
        create(num_cpus=3, join_timeout_s=1).start()


@pytest.mark.usefixtures("cluster")
def test_tensor_parallel_groups_are_packed_and_stages_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ranks get the variables that travel."""
    monkeypatch.setenv("DOVETAIL_MODE", "engine")
    monkeypatch.setenv("OTHER_MODE", "engine")
    executor = create_two_stages()
    executor.start()
    ranks = [psutil.Process(pid) for pid in executor.call("pid")]
    raylets = [rank.parents()[2].pid for rank in ranks]
    environments = [rank.environ() for rank in ranks]
    stages = [placement.stage for placement in executor.call("placement")]
    executor.shutdown()
    assert stages == [0, 0, 1, 1]
    assert all(found["DOVETAIL_MODE"] == "engine" and "OTHER_MODE" not in found for found in environments)
    assert raylets[0] == raylets[1] != raylets[2] == raylets[3]


@pytest.mark.usefixtures("cluster")
def test_what_ray_says_of_a_killed_actor_is_in_the_error() -> None:
    executor = create_two_stages()
    executor.start()
    processes = with_parents(executor.call("pid"))
    actor = processes[-1]
    actor.kill()
    with pytest.raises(WorkerError) as caught:
        run_steps(executor)
    executor.shutdown()
    assert all_end(processes)
    assert re.search(
        r"worker rank [23] \(node 1, pid \d+, stage 1, tensor rank [01]\) was lost: node 1 \(.*\) is gone: its agent"
        rf" ended; Ray says: .*pid: {actor.pid}.* its worker process has died. Worker exit type: SYSTEM_ERROR",
        str(caught.value),
    )


DRIVER = """
import sys
import ray
from dovetail.contracts.executor import ExecutorNeed
from dovetail.executors.ray import RayExecutor, RayOptions
from dovetail.testing.toy_worker import ToySpec
executor = RayExecutor(RayOptions(nodes=2, address=sys.argv[1]), ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))
executor.start()
print("PIDS", *executor.call("pid"), flush=True)
sys.stdin.read()
"""


def test_actors_and_ranks_end_with_the_driver(cluster: Any) -> None:
    command = [sys.executable, "-c", DRIVER, cluster.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if line.startswith("PIDS"))
        processes = with_parents([int(pid) for pid in line.split()[1:]])
        driver.kill()
    assert len(processes) == 6
    assert all_end(processes)


@pytest.fixture
def serve_url(cluster: Any) -> Iterator[str]:
    """Where Ray Serve listens."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def test_two_replicas_of_ray_serve_answer_and_one_may_be_killed(serve_url: str, tmp_path: Path) -> None:
    """With the tokens of one process."""
    from ray import serve

    save_tiny_model(tmp_path, tiny_config("llama"))
    prompt = [7, 8, 9, 7, 8, 9]
    expected = tokens_of(tmp_path, [prompt], name="cpu")[0]
    config = {
        "model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"num_blocks": 60},
        "server": {"served_model_name": "tiny"},
    }
    serve.run(app({"config": config, "num_replicas": 2}))

    def answer(_: int) -> Any:
        return served_tokens(serve_url, prompt)

    replicas = [process for process in psutil.Process().children(recursive=True) if is_replica(process)]
    assert len(replicas) == 2
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, range(8))) == [expected] * 8
        processes = [replicas[0], *replicas[0].children(recursive=True)]
        replicas[0].kill()
        assert all_end(processes)
        assert list(pool.map(answer, range(8))) == [expected] * 8


def test_a_replica_of_ray_serve_has_its_workers_in_the_same_cluster(
    serve_url: str, tmp_path: Path, temporary_files: Path
) -> None:
    """And gives back what it reserved, and leaves no files."""
    import ray
    from ray import serve

    save_tiny_model(tmp_path, tiny_config("llama"))
    prompt = [7, 8, 9, 7, 8, 9]
    config = {
        "model": {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"num_blocks": 60},
        "executor": {"name": "ray", "pipeline_parallel": 2, "threads": 1},
        "server": {"served_model_name": "tiny"},
    }
    before = set(temporary_files.glob("dovetail-*"))  # a replica that was killed leaves some
    serve.run(app({"config": config}))
    assert served_tokens(serve_url, prompt) == tokens_of(tmp_path, [prompt], name="cpu")[0]
    assert ray.available_resources()["CPU"] == 4 - 1 - 2  # the replica's, and one for each rank
    serve.delete("default")
    deadline = time.monotonic() + 60
    while ray.available_resources()["CPU"] < 4:
        assert time.monotonic() < deadline, "the ranks' CPUs stay reserved"
        time.sleep(0.05)
    assert set(temporary_files.glob("dovetail-*")) <= before


def served_tokens(url: str, prompt: list[int]) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
    return response.json()["choices"][0]["token_ids"] if response.is_success else response.text


def is_replica(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[0].startswith("ray::ServeReplica")
    except (psutil.NoSuchProcess, IndexError):  # it ended
        return False


def test_a_raylet_that_is_removed_is_named(cluster: Any) -> None:
    """Last: the cluster has one raylet less."""
    executor = create()
    executor.start()
    processes = with_parents(executor.call("pid"))
    (other,) = [node for node in cluster.list_all_nodes() if not node.head]
    cluster.remove_node(other, allow_graceful=False)
    with pytest.raises(WorkerError, match=r"was lost: node \d \(.*\) is gone: .*; Ray (says|did not say)|was killed"):
        run_steps(executor)
    executor.shutdown()
    assert all_end(processes)
