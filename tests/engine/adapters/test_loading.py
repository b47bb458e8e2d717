"""Adapters are read while their requests are held, have one name at a time, and are unloaded when nobody uses them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.lora import AdapterConflict, AdapterNotFound
from dovetail.contracts.telemetry import RequestStats, StepStats, TelemetrySink
from dovetail.engine.explanation import explain
from dovetail.testing.tiny_adapters import save_adapter

MakeLLM = Callable[..., LLM]
MakeAdapter = Callable[..., LoRARequest]
PROMPT = [3 + 7 * i % 120 for i in range(22)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ON = {"enabled": True, "max_loras": 2}


def tokens(llm: LLM, lora: LoRARequest | None = None) -> list[int]:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=lora)[0].outputs[0].token_ids


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until every request has ended, waiting for those that are held."""
    outputs = {}
    while engine.has_unfinished_requests():
        with engine.wakeup:
            assert engine.wakeup.wait_for(lambda: engine.is_runnable, timeout=60)
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


@contextmanager
def reading_stopped(engine: LLMEngine) -> Iterator[None]:
    """Inside, the thread that reads adapters waits."""
    known = engine.tokens._adapters._known
    assert known is not None
    gate = threading.Event()
    known._reader.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def test_a_request_is_held_until_its_adapter_is_read(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    engine, lora = make_llm(lora=ON).engine, make_adapter("pirate")
    engine.keep_ended(4)
    with reading_stopped(engine):
        engine.add_request("adapted", PROMPT, GREEDY, lora_request=lora)
        engine.add_request("plain", PROMPT, GREEDY)
        ended = {}
        while engine.is_runnable:
            ended |= {output.request_id: output for output in engine.step() if output.finished}
        assert ended.keys() == {"plain"}
        (report,) = engine.explain_request("adapted").requests
        assert (report.state, report.stats.adapter) == ("loading", "pirate")
        assert engine.list_loras() == []
    found = run(engine)["adapted"]
    assert found.error is None
    assert found.outputs[0].token_ids == tokens(make_llm(lora=ON), lora)
    (report,) = engine.explain_request("adapted").requests
    assert (report.state, report.stats.adapter) == ("finished", "pirate")


def test_requests_fail_where_their_adapter_cannot_be_read(make_llm: MakeLLM, tmp_path: Path) -> None:
    engine = make_llm(lora=ON).engine
    with reading_stopped(engine):
        for name in ("first", "second"):
            engine.add_request(name, PROMPT, GREEDY, lora_request=LoRARequest("gone", 0, str(tmp_path / "gone")))
        engine.add_request("aborted", PROMPT, GREEDY, lora_request=LoRARequest("gone"))
        engine.abort_request("aborted")
    found = run(engine)
    assert found.keys() == {"first", "second"}
    assert all("adapter 'gone' cannot be loaded" in str(output.error) for output in found.values())
    with pytest.raises(AdapterNotFound, match=r"no adapter .gone. is loaded \(none is loaded\): load it"):
        engine.add_request("third", PROMPT, GREEDY, lora_request=LoRARequest("gone"))


def test_adapters_are_listed_with_what_they_are(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, lora = make_llm(lora=ON), make_adapter("pirate", rank=3)
    added = llm.add_lora(lora)
    assert (added.name, added.int_id, added.path, added.rank) == ("pirate", 1, lora.lora_path, 3)
    assert not added.is_in_slot
    tokens(llm, LoRARequest("pirate"))
    (listed,) = llm.list_loras()
    assert listed.is_in_slot
    assert listed.digest == added.digest
    assert llm.add_lora(lora) == listed  # as it is: nothing is read again


def test_adapters_of_the_config_are_there_from_the_start(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    lora = make_adapter("pirate")
    llm = make_llm(lora=ON | {"modules": {"pirate": lora.lora_path}})
    assert [each.name for each in llm.list_loras()] == ["pirate"]
    assert tokens(llm, LoRARequest("pirate")) == tokens(make_llm(lora=ON), lora)


def test_folders_of_adapters_count_from_the_config_file(
    make_adapter: MakeAdapter, tmp_path: Path, tiny_llama: tuple[Path, Any]
) -> None:
    lora = make_adapter("a.b/pirate")
    path = tmp_path / "a.b" / "engine.yaml"
    section = {"enabled": True, "modules": {"org/pirate-1.0": "pirate"}}
    model = {"path": str(tiny_llama[0]), "tokenizer_mode": "none"}
    path.write_text(json.dumps({"model": model, "lora": section}))
    with LLM(config=path) as llm:
        [listed] = llm.list_loras()
    assert (listed.name, listed.path) == ("org/pirate-1.0", lora.lora_path)


def test_an_engine_does_not_start_without_an_adapter_of_its_config(make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.modules\.pirate: adapter 'pirate' cannot be loaded: .* is not there"):
        make_llm(lora=ON | {"modules": {"pirate": str(tmp_path / "pirate")}})


class Adapters(TelemetrySink):
    """Names of the adapters of first tokens and of requests."""

    contract = (1, 0)

    def __init__(self) -> None:
        self.first_tokens: list[str] = []
        self.requests: list[str] = []

    def on_step(self, stats: StepStats) -> None:
        self.first_tokens += [first.adapter for first in stats.first_tokens]

    def on_request(self, stats: RequestStats) -> None:
        self.requests.append(stats.adapter)


def test_measurements_name_the_adapter(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, sink = make_llm(lora=ON), Adapters()
    llm.engine.add_telemetry_sink(sink)
    tokens(llm, make_adapter("pirate"))
    tokens(llm)
    assert sink.first_tokens == sink.requests == ["pirate", ""]


def test_an_adapter_that_is_in_a_slot_needs_its_files_no_more(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, lora = make_llm(lora=ON), make_adapter("pirate")
    found = tokens(llm, lora)
    shutil.rmtree(lora.lora_path)
    assert tokens(llm, lora) == found


@pytest.mark.parametrize(("dtype", "num_bytes"), [("auto", 4), ("bfloat16", 2)])
def test_explain_counts_the_slots(tiny_llama: tuple[Path, Any], dtype: str, num_bytes: int) -> None:
    """In a layer of the tiny model 64 x 64 and 64 x 96 in and out: queries, keys and values are one layer of three
    parts, gate and up one of two."""
    config = {
        "model": {"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32"},
        "lora": {"enabled": True, "max_loras": 3, "max_rank": 8, "dtype": dtype},
    }
    estimate = explain(load_config(config)).estimate
    assert estimate is not None
    a = 3 * 64 + 64 + 2 * 64 + 96
    b = (64 + 32 + 32) + 64 + 2 * 96 + 64
    assert estimate.adapter_bytes == 3 * 2 * 8 * (a + b) * num_bytes


def test_an_adapter_in_use_is_not_unloaded(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    engine, lora = make_llm(lora=ON).engine, make_adapter("pirate")
    engine.add_request("a", PROMPT, GREEDY, lora_request=lora)
    with pytest.raises(AdapterConflict, match="'pirate' is used by 1 request: let them end, or abort them"):
        engine.remove_lora("pirate")
    run(engine)
    engine.remove_lora("pirate")
    with pytest.raises(AdapterNotFound, match="no adapter 'pirate' is loaded"):
        engine.remove_lora("pirate")
    with pytest.raises(AdapterNotFound):
        engine.add_request("b", PROMPT, GREEDY, lora_request=LoRARequest("pirate"))


def test_an_adapter_that_is_removed_while_it_is_read_is_not_loaded(
    make_llm: MakeLLM, make_adapter: MakeAdapter
) -> None:
    engine, lora = make_llm(lora=ON).engine, make_adapter("pirate")
    with reading_stopped(engine):
        first = engine.start_lora(lora)
        engine.remove_lora("pirate")
        again = engine.start_lora(lora)
    with pytest.raises(AdapterConflict, match="adapter 'pirate' was removed while it was read"):
        first.result()
    assert again.result().name == "pirate"
    assert len(engine.list_loras()) == 1


def test_a_reload_under_one_name_never_meets_the_kv_of_the_old_one(
    make_llm: MakeLLM, make_adapter: MakeAdapter, tiny_llama: tuple[Path, Any]
) -> None:
    """As a client of a server would do it: the files are written anew, under the same name and path."""
    llm, lora = make_llm(lora=ON), make_adapter("pirate", 1)
    old = tokens(llm, lora)
    llm.remove_lora("pirate")
    save_adapter(Path(lora.lora_path), tiny_llama[0], seed=2)
    new = tokens(llm, lora)
    assert new == tokens(make_llm(lora=ON), lora) != old
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=lora)
    assert output.num_cached_tokens == 20  # the prefix cache is on: its blocks are those of the new content
    assert output.outputs[0].token_ids == new
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_equal_adapters_share_cached_prefixes_whatever_their_names(
    make_llm: MakeLLM, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    llm, lora = make_llm(lora=ON), make_adapter("pirate")
    shutil.copytree(lora.lora_path, tmp_path / "copy")
    twin = LoRARequest("twin", 0, str(tmp_path / "copy"))
    found = tokens(llm, lora)
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request=twin)
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (20, found)
    llm.remove_lora("pirate")
    assert [each.is_in_slot for each in llm.list_loras()] == [True]
    assert tokens(llm, twin) == found


def test_changed_files_are_not_taken_for_what_was_loaded(
    make_llm: MakeLLM, make_adapter: MakeAdapter, tiny_llama: tuple[Path, Any]
) -> None:
    engine = make_llm(lora=ON | {"max_loras": 1}).engine
    first, second = make_adapter("first", 1), make_adapter("second", 2)
    for lora in (first, second):
        engine.add_lora(lora)
    save_adapter(Path(first.lora_path), tiny_llama[0], seed=3)
    engine.add_request("changed", PROMPT, GREEDY, lora_request=first)
    engine.add_request("well", PROMPT, GREEDY, lora_request=second)
    found = run(engine)
    assert "the files of adapter 'first' in" in str(found["changed"].error)
    assert found["well"].error is None
    with pytest.raises(AdapterConflict, match="unload it, and load it again"):
        engine.add_lora(first)
    engine.remove_lora("first")
    engine.add_lora(first)
    engine.add_request("again", PROMPT, GREEDY, lora_request=first)
    assert run(engine)["again"].error is None


def test_one_name_and_one_number_are_one_adapter(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, first, second = make_llm(lora=ON), make_adapter("first", 1), make_adapter("second", 2)
    llm.add_lora(LoRARequest("first", 7, first.lora_path))
    with pytest.raises(AdapterConflict, match=r"'first' is loaded from .*first, and .*second was given: unload"):
        llm.add_lora(LoRARequest("first", 7, second.lora_path))
    with pytest.raises(AdapterConflict, match="lora_int_id 7 is that of adapter 'first', and 'second' needs"):
        llm.add_lora(LoRARequest("second", 7, second.lora_path))
    with pytest.raises(AdapterConflict, match="has the number 7, and lora_int_id 8 was given"):
        llm.add_lora(LoRARequest("first", 8, first.lora_path))
    llm.remove_lora(7)
    assert llm.list_loras() == []


def test_an_engine_without_adapters_says_so(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, lora = make_llm(), make_adapter("pirate")
    for call in (lambda: tokens(llm, lora), lambda: llm.add_lora(lora), lambda: llm.remove_lora("pirate")):
        with pytest.raises(RequestError, match=r"this engine serves none: set lora\.enabled \(enable_lora=True\)"):
            call()
    assert llm.list_loras() == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"modules": {"a": "/a"}}, r"lora\.modules .* names adapters, and lora\.enabled is off"),
        ({"enabled": True, "max_loras": 4, "max_cpu_loras": 2}, r"max_cpu_loras 2 .* is less than lora\.max_loras 4"),
        ({"enabled": True, "max_rank": 0}, "max_rank"),
        ({"enabled": True, "modules": {" ": "/a"}}, "a name and a folder are needed"),
    ],
)
def test_sections_that_contradict_themselves_are_refused(make_llm: MakeLLM, section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(lora=section)


def test_slots_are_no_wider_than_the_model(make_llm: MakeLLM) -> None:
    for dtype in ("float32", "float16"):
        message = rf"lora\.dtype {dtype} .*: adapters have the model's dtype, which is bfloat16"
        with pytest.raises(ConfigError, match=message):
            make_llm(model={"dtype": "bfloat16"}, lora={"enabled": True, "dtype": dtype})


def test_lora_request_is_one_or_one_for_each_prompt(make_llm: MakeLLM, make_adapter: MakeAdapter) -> None:
    llm, lora = make_llm(lora=ON), make_adapter("pirate")
    with pytest.raises(RequestError, match="lora_request has 1 entries for 2 prompts"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, lora_request=[lora])
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        llm.generate([PROMPT], GREEDY, use_tqdm=False, lora_request="pirate")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="is no name"):
        LoRARequest(" ")
    with pytest.raises(RequestError, match="must be an integer above 0"):
        LoRARequest("a", -1)
