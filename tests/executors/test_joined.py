"""The `joined` executor: two agents on this machine, in place of two machines."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

import dovetail.worker.__main__
from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError, PluginError, WorkerError
from dovetail.contracts.executor import ExecutorNeed, Placement
from dovetail.contracts.joining import COMPARED_PACKAGES, JoinedNode, dial, parse_address, read_key, write_key
from dovetail.contracts.plugin import Environment
from dovetail.executors.joined import JoinedExecutor, JoinedOptions
from dovetail.executors.nodes import base, greetings, inspection
from dovetail.executors.nodes.agent import serve_node
from dovetail.executors.nodes.hub import Hub
from dovetail.executors.nodes.links import NodeLink
from dovetail.executors.nodes.messages import Inspect, Inspection, NotStarted, Start, Tick
from dovetail.executors.nodes.variables import variables_for_nodes
from dovetail.testing.executor_suite import ExecutorSuite
from dovetail.testing.tiny_models import save_tiny_model, tiny_config
from dovetail.testing.toy_worker import Fault, ToySpec, toy_plan
from tests.ports import free_ports

KEY = b"k" * 32


@dataclass(frozen=True)
class Site:
    """Where nodes join, and the key."""

    listen: str
    key_file: Path

    @contextmanager
    def agent(self, name: str, *arguments: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """An agent, killed at the end."""
        command = [sys.executable, "-P", "-m", "dovetail.worker", "--join", self.listen, "--name", name]
        command += ["--key-file", str(self.key_file), *arguments]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd) as process:
            try:
                yield process
            finally:
                process.kill()

    def executor(self, spec: ToySpec | None = None, nodes: Any = 2, **options: Any) -> JoinedExecutor:
        chosen = JoinedOptions(listen=self.listen, key_file=self.key_file, nodes=nodes, **options)
        return JoinedExecutor(chosen, spec or ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))


def make_site(folder: Path) -> Site:
    write_key(folder / "key")
    return Site(f"127.0.0.1:{free_ports()}", folder / "key")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Where `two_nodes` join again and again."""
    return make_site(tmp_path_factory.mktemp("key"))


@pytest.fixture
def own_site(tmp_path: Path) -> Site:
    """Where only a test's own agents join."""
    return make_site(tmp_path)


@pytest.fixture(scope="module")
def two_nodes(site: Site) -> Iterator[tuple[subprocess.Popen[str], ...]]:
    with site.agent("a") as first, site.agent("b") as second:
        yield first, second


@pytest.mark.nightly
@pytest.mark.usefixtures("two_nodes")
class TestJoinedExecutor(ExecutorSuite):
    plugin = JoinedExecutor
    tensor_parallel = 2

    @pytest.fixture(autouse=True)
    def _here(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        options = {"listen": site.listen, "key_file": site.key_file, "nodes": 2}
        monkeypatch.setattr(type(self), "options", options)

    def test_another_executor_may_follow_or_stand_beside(self) -> None:
        """One beside needs a port and nodes of its own; that one may follow, all tests here show."""


def started(executor: JoinedExecutor) -> list[psutil.Process]:
    executor.start()
    return [psutil.Process(pid) for pid in executor.call("pid")]


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


@pytest.mark.usefixtures("two_nodes")
def test_an_engine_over_two_nodes_gives_the_tokens_of_one_process(site: Site, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    prompts = [[7, 8, 9, 7, 8, 9], [100, 4, 33]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def run(**executor: Any) -> list[list[int]]:
        model = {"path": str(tmp_path), "tokenizer_mode": "none", "dtype": "float32"}
        with LLM(model=model, cache={"num_blocks": 60}, executor={"threads": 1, **executor}) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    where = {"name": "joined", "listen": site.listen, "key_file": str(site.key_file), "nodes": ["b", "a"]}
    expected = run(name="cpu")
    assert run(tensor_parallel=2, **where) == expected
    assert run(pipeline_parallel=2, **where) == expected


@pytest.mark.usefixtures("two_nodes")
def test_a_killed_rank_is_named_with_its_node(site: Site) -> None:
    executor = site.executor(ToySpec(all_reduce=True, num_threads=1))
    processes = started(executor)
    placements: list[Placement] = executor.call("placement")
    assert [placement.node for placement in placements] == [0, 1]
    processes[1].kill()
    with pytest.raises(WorkerError, match=r"worker rank 1 \(node b, pid \d+\) was killed by SIGKILL"):
        run_steps(executor)
    executor.shutdown()
    assert all_end(processes)


@pytest.mark.usefixtures("two_nodes")
def test_ranks_get_the_variables_that_travel_and_keep_the_rest_of_their_machine(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DOVETAIL_MODE", "MYLAB_MODE", "OTHER_MODE"):
        monkeypatch.setenv(name, "engine")
    monkeypatch.setenv("HOME", "/engine")
    executor = site.executor(environment=("MYLAB_*",))
    found = [process.environ() for process in started(executor)]
    executor.shutdown()
    for environment in found:
        assert (environment["DOVETAIL_MODE"], environment["MYLAB_MODE"]) == ("engine", "engine")
        assert "OTHER_MODE" not in environment
        assert environment["HOME"] != "/engine"


def test_which_variables_travel() -> None:
    shared = {"NCCL_DEBUG": "INFO", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1", "MYLAB_MODE": "fast"}
    of_a_machine = {"NCCL_SOCKET_IFNAME": "eth0", "TORCH_HOME": "/a", "MKL_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"}
    secrets = {"HF_TOKEN": "x", "DOVETAIL_API_KEY": "x", "MYLAB_SECRET": "x"}
    named = {"HF_HOME": "/shared"}
    everything = {**shared, **of_a_machine, **secrets, **named, "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3"}
    assert variables_for_nodes(everything, ["MYLAB_*", "HF_HOME", "CUDA_*"]) == {**shared, **named}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("HF_TOKEN", "looks like a secret"), ("*", "neither the name"), ("CUDA_VISIBLE_DEVICES", "GPUs of one machine")],
)
def test_variables_that_may_not_travel_are_refused(pattern: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        JoinedOptions(environment=(pattern,))


@pytest.mark.usefixtures("two_nodes")
def test_a_halted_rank_meets_the_deadline(site: Site) -> None:
    """Its machine acknowledges nothing either, once the buffers are full: that does not count as a node's loss."""
    executor = site.executor(step_timeout_s=1.0, node_timeout_s=0.2)
    processes = started(executor)
    processes[1].suspend()
    with pytest.raises(WorkerError, match=r"was not done after 1 s"):
        run_steps(executor, num_requests=50_000)
    executor.shutdown()
    assert all_end(processes)


def run_steps(executor: JoinedExecutor, num_requests: int = 3) -> None:
    for step_id in range(1_000_000):
        executor.execute(toy_plan(step_id, num_requests)).result(timeout=60)


def test_a_node_that_is_removed_is_named_and_a_spare_takes_over(own_site: Site) -> None:
    with own_site.agent("a"), own_site.agent("b") as second:
        executor = own_site.executor()
        processes = started(executor)
        with own_site.agent("c") as spare:
            assert spare.stderr is not None
            assert "it has the 2 nodes that it needs" in spare.stderr.readline()
            second.kill()
            with pytest.raises(WorkerError, match=r"worker rank 1 \(node b, .*was lost: node b \(127.0.0.1\) is gone"):
                run_steps(executor)
            executor.shutdown()
            assert all_end(processes)
            anew = own_site.executor(nodes=["c", "a"])
            started(anew)
            anew.shutdown()


DRIVER = """
import sys
from pathlib import Path
from dovetail.contracts.executor import ExecutorNeed
from dovetail.executors.joined import JoinedExecutor, JoinedOptions
from dovetail.testing.toy_worker import ToySpec
options = JoinedOptions(listen=sys.argv[1], key_file=Path(sys.argv[2]), nodes=2)
executor = JoinedExecutor(options, ToySpec(), ExecutorNeed("cpu", tensor_parallel=2))
executor.start()
print(*executor.call("pid"), flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("two_nodes")
def test_ranks_end_with_the_driver(site: Site) -> None:
    command = [sys.executable, "-c", DRIVER, site.listen, str(site.key_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        processes[0].send_signal(signal.SIGSTOP)
        driver.kill()
    assert len(processes) == 2
    assert all_end(processes)


def test_nodes_that_are_missing_are_named(own_site: Site) -> None:
    with own_site.agent("a"), pytest.raises(WorkerError, match=r"1 of 2 nodes joined in 8 s \(joined: a; missing: z\)"):
        own_site.executor(nodes=["a", "z"], join_timeout_s=8).start()


def test_a_port_that_is_taken_is_named(own_site: Site) -> None:
    with socket.create_server(parse_address(own_site.listen)), pytest.raises(PluginError, match=r"port \d+ is taken"):
        own_site.executor().start()


@pytest.mark.usefixtures("two_nodes")
def test_what_does_not_fit_on_a_node_is_named_before_a_weight_is_read(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GPUs that are asked of nodes without, another version of a package here, and a clock that differs."""
    monkeypatch.setattr(base, "time", SimpleNamespace(time=lambda: time.time() + 100, monotonic=time.monotonic))
    monkeypatch.setattr(base, "_installed", lambda name: "0.1" if name == "numpy" else metadata.version(name))
    options = JoinedOptions(listen=site.listen, key_file=site.key_file, nodes=2)
    with pytest.raises(PluginError, match="no weight was read") as caught:
        JoinedExecutor(options, ToySpec(), ExecutorNeed("cuda", tensor_parallel=2)).start()
    for name in "ab":
        assert f"node {name} (127.0.0.1): 1 GPUs are needed there, and torch sees 0" in str(caught.value)
        assert re.search(rf"node {name} \(127.0.0.1\): numpy \S+ is there, and 0.1 here", str(caught.value))
        assert f"the clock of node {name} differs by" in caplog.text


def test_a_refusal_is_reported_to_both_sides() -> None:
    """Two machines with one name, say."""
    hub = Hub(("127.0.0.1", 0), KEY, timeout_s=1.0, count=2, names=None, advice="Dial port {port}.")
    first, second = (Connection(socket.create_connection(("127.0.0.1", hub.port)).detach()) for _ in "ab")
    try:
        assert "module" in greeted(first, KEY, "a")
        assert greeted(second, KEY, "a")["refused"] == "a node named a has joined already: give each its own --name"
        with pytest.raises(
            WorkerError, match=rf"\(joined: a\)\. Refused were node a \(127.0.0.1\): a node .* Dial port {hub.port}"
        ):
            hub.wait(0.2)
    finally:
        first.close()
        second.close()
        hub.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(("127.0.0.1", 0), KEY, timeout_s=1.0, count=1, names=["a"], advice="")
    yield made
    made.close()


def dialled(hub: Hub) -> Connection:
    return Connection(socket.create_connection(("127.0.0.1", hub.port)).detach())


def test_callers_that_say_nothing_keep_nobody_waiting(hub: Hub) -> None:
    """As many as are greeted at a time, and some: the oldest make way."""
    silent = [socket.create_connection(("127.0.0.1", hub.port)) for _ in range(70)]
    with dialled(hub) as node:
        assert "module" in greeted(node, KEY, "a")
        assert [found.name for found in hub.wait(10)] == ["a"]
    for end in silent:
        end.close()


def test_a_caller_that_does_not_end_the_greeting_is_ended(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for all of its bytes together, though each comes in time."""
    monkeypatch.setattr(greetings, "_DEADLINE_S", 0.0)
    with socket.create_connection(("127.0.0.1", hub.port)) as end:
        end.sendall(b"\0\0\0\x40x")  # the first of 64 bytes
        while end.recv(1024):
            pass
    for thread in threading.enumerate():
        if thread.name == "dovetail-greeting":
            thread.join()
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1: it did not end the greeting"):
        hub.wait(0.1)


@pytest.mark.parametrize("challenges", [False, True])
def test_a_driver_that_halts_in_the_greeting_is_not_waited_for(challenges: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as driver, ThreadPoolExecutor(1) as side:
        dialling = side.submit(dial, driver.getsockname(), KEY, patience_s=0.5)
        with Connection(driver.accept()[0].detach()) as connection:
            if challenges:
                with suppress(EOFError, OSError):  # it may have given up already
                    deliver_challenge(connection, KEY)
            with pytest.raises(TimeoutError, match="it does not answer"):
                dialling.result()


def test_a_node_that_is_lost_before_a_rank_starts_there_is_named_at_once() -> None:
    here, there = (Connection(end.detach()) for end in socket.socketpair())
    link = NodeLink({"name": "a", "address": "10.0.0.1", "versions": {}}, here, timeout_s=1.0)
    there.close()
    while link.lost is None:
        time.sleep(0.001)

    def nobody_dials(token: str, timeout_s: float) -> Connection:
        raise TimeoutError

    process = link.start(0, {}, 1, nobody_dials)
    with pytest.raises(ConnectionError, match=r"was lost: node a \(10\.0\.0\.1\) is gone: its agent ended"):
        process.connect(timeout_s=60)
    link.close()


def test_a_package_that_a_node_lacks_differs() -> None:
    installed = {name: metadata.version(name) for name in COMPARED_PACKAGES}
    python = ".".join(map(str, sys.version_info[:2]))
    assert base._other_versions({"python": f"{python}.99", **installed}) == []
    del installed["numpy"]
    (reason,) = base._other_versions({"python": f"{python}.99", **installed})
    assert reason.startswith("numpy none is there, and ")


def test_a_refusal_names_each_caller_and_the_next_one_joins(hub: Hub) -> None:
    """A caller that has the key and says nonsense, and a machine of another name."""
    with dialled(hub) as odd, dialled(hub) as other, dialled(hub) as node:
        answer_challenge(odd, KEY)
        deliver_challenge(odd, KEY)
        odd.send_bytes(b"[1]")
        with pytest.raises((EOFError, OSError)):
            odd.recv_bytes()
        assert "does not name b" in greeted(other, KEY, "b")["refused"]
        with pytest.raises(WorkerError) as caught:
            hub.wait(0.1)
        assert "127.0.0.1: it broke off the greeting (ValueError('its hello is no object" in str(caught.value)
        assert "; node b (127.0.0.1): executor.nodes does not name b" in str(caught.value)
        assert "module" in greeted(node, KEY, "a")


@pytest.fixture
def engine_of_an_agent() -> Iterator[Connection]:
    """The engine's end of a connection to an agent in a thread, which ends with the engine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = Connection(socket.create_connection(listener.getsockname()).detach())
        here = Connection(listener.accept()[0].detach())
    node = JoinedNode(name="a", address="127.0.0.1", driver=("127.0.0.1", 1), key=KEY)
    with there, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve_node, there, node)
        with here:
            yield here
        assert served.result(timeout=60) == "it ended the connection"


def next_message(engine: Connection, kind: type) -> Any:
    while not isinstance(message := pickle.loads(engine.recv_bytes()), kind):
        pass
    return message


def test_what_cannot_be_started_on_a_node_is_reported(
    engine_of_an_agent: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/none/python")
    engine_of_an_agent.send_bytes(pickle.dumps(Inspect(b"", "cpu")))
    assert "no process could be started" in next_message(engine_of_an_agent, Inspection).problem
    engine_of_an_agent.send_bytes(pickle.dumps(Start("token", 0, {}, 1, 1.0)))
    assert "/none/python: [Errno 2]" in next_message(engine_of_an_agent, NotStarted).why


def test_an_agent_goes_on_while_it_looks_at_its_machine(engine_of_an_agent: Connection) -> None:
    """And what looks ends with the engine."""
    engine_of_an_agent.send_bytes(pickle.dumps(Inspect(pickle.dumps(Forever()), "cpu")))
    for _ in range(3):
        next_message(engine_of_an_agent, Tick)


class Forever:
    """Unpickled by a process that waits for good."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return time.sleep, (100_000,)


def test_an_inspection_that_takes_too_long_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_TIMEOUT_S", 0.0)
    inspector = inspection.Inspector(Inspect(pickle.dumps(Forever()), "cpu"))
    while (found := inspector.answer()) is None:
        pass
    inspector.end()
    assert "was not done in 0 s" in found.problem


def greeted(connection: Connection, key: bytes, name: str) -> dict[str, str]:
    """The hub's answer to a machine."""
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(json.dumps({"role": "node", "name": name, "address": "::1", "versions": {}}).encode())
    answer: dict[str, str] = json.loads(connection.recv_bytes())
    return answer


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--join here", r"'here' is no HOST:PORT such as 10\.0\.0\.1:29400"),
        ("--join 127.0.0.1:29400", "--join HOST:PORT and --key-file PATH are needed"),
        ("--join 127.0.0.1:29400 --key-file {folder}/none", "make one with: python -m dovetail.worker --new-key"),
        ("--new-key {folder}/key", "exists already.*: choose another path"),
        (
            "--join {listen} --key-file {folder}/key --patience-s 0",
            r"no engine at .* \(Connection refused\): start the engine, and give --join the address and port",
        ),
    ],
)
def test_a_wrong_command_line_says_what_to_do(
    own_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, why: str
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    folder = own_site.key_file.parent
    with pytest.raises(SystemExit) as ended:
        sys.exit(dovetail.worker.__main__.main(arguments.format(folder=folder, listen=own_site.listen).split()))
    assert ended.value.code
    assert re.search(why, capsys.readouterr().err)


def test_another_key_joins_nothing(own_site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_key(other)
    with Site(own_site.listen, other).agent("a") as agent:
        with pytest.raises(WorkerError, match=r"Refused were 127\.0\.0\.1: it has another key"):
            own_site.executor(nodes=1, join_timeout_s=8).start()
        assert agent.stderr is not None
        assert "another key than --key-file" in agent.stderr.read()


def test_a_key_is_needed_and_is_its_owners_alone(tmp_path: Path) -> None:
    need, machine = ExecutorNeed("cpu"), Environment("cpu", 1, 1)
    assert "--new-key" in JoinedExecutor.check(need, JoinedOptions(), machine)[0]
    path = tmp_path / "key"
    write_key(path)
    assert JoinedExecutor.check(need, JoinedOptions(key_file=path), machine) == []
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_key(path)


@pytest.mark.parametrize(("nodes", "why"), [([], "names no node"), (["a", "b", "a"], "names a twice")])
def test_a_list_of_nodes_has_each_once(nodes: list[str], why: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key(path)
    reasons = JoinedExecutor.check(
        ExecutorNeed("cpu"), JoinedOptions(key_file=path, nodes=nodes), Environment("cpu", 1, 1)
    )
    assert f"executor.nodes {why}" in reasons


def test_replicas_would_listen_at_one_address(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key(path)
    options = JoinedOptions(key_file=path, listen="0.0.0.0:29401")
    (reason,) = JoinedExecutor.check(ExecutorNeed("cpu", num_replicas=2), options, Environment("cpu", 1, 1))
    assert "server.data_parallel_size is 2, and all replicas would listen at 0.0.0.0:29401: leave it at 1" in reason


@pytest.mark.parametrize(
    ("stages", "ranks", "num_nodes", "expected"),
    [
        (2, 2, 2, (0, 0, 1, 1)),
        (1, 4, 2, (0, 0, 1, 1)),
        (3, 1, 2, (0, 0, 1)),
        (2, 2, 4, (0, 1, 2, 3)),
        (2, 2, 3, None),
        (1, 2, 3, None),
    ],
)
def test_groups_stay_on_one_node(stages: int, ranks: int, num_nodes: int, expected: tuple[int, ...] | None) -> None:
    from dovetail.executors.nodes.spread import ranks_of_nodes, reasons_against_spread

    need = ExecutorNeed("cpu", tensor_parallel=ranks, pipeline_parallel=stages)
    assert bool(reasons_against_spread(need, num_nodes)) == (expected is None)
    if num_nodes == 3 and stages == 2 and expected is None:
        assert "set executor.nodes to 1 or 2 or 4" in reasons_against_spread(need, num_nodes)[0]
    if expected is not None:
        assert ranks_of_nodes(need, num_nodes) == expected


def test_a_fault_at_start_is_raised(own_site: Site) -> None:
    """By a worker that lacks a plugin, say."""
    with own_site.agent("a"), own_site.agent("b"):
        executor = own_site.executor(ToySpec(faults=(Fault(1, "create", "raise", PluginError("no plugin 'x'")),)))
        with pytest.raises(PluginError, match=r"rank 1 on host .+: no plugin 'x'"):
            executor.start()
