"""An engine with a KV connector: what is found there is not computed, and whatever it does, the tokens stay."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv_connector import BlockStore, StoreSetup
from dovetail.plugins.kv_connectors.host import Host, HostOptions, HostStore
from dovetail.plugins.kv_connectors.recent_records import RecentRecords
from tests.ports import free_ports
from tests.waiting import wait_until

BLOCK_SIZE = 4
PROMPT = [(7 * i * i + 3 * i) % 128 for i in range(101)]
FULL = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens_of(
    llm: LLM, prompt: Sequence[int] = PROMPT, extra: Mapping[str, Any] | None = None
) -> tuple[int, list[int]]:
    """How many tokens of the prompt were found, and what was generated."""
    output = llm.generate([{"prompt_token_ids": list(prompt)}], replace(GREEDY, extra=extra or {}))[0]
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


def saved(llm: LLM) -> None:
    """What was computed is with the connector, and nowhere else."""
    llm.engine.tokens.exchange.settle()
    llm.reset_prefix_cache()


def counts(llm: LLM) -> Any:
    return llm.engine.tokens.exchange.statistics


class Copy(bytearray):
    """A record that a store returned."""


class Liar(Host):
    """Host memory that does what the test asks."""

    way: ClassVar[str] = ""
    copies: ClassVar[list[weakref.ref[Copy]]] = []
    gate: ClassVar[threading.Event] = threading.Event()
    waits: ClassVar[threading.Event] = threading.Event()
    """A read that does not answer has begun."""

    @classmethod
    def open_store(cls, options: HostOptions, setup: StoreSetup) -> BlockStore:
        store = super().open_store(options, setup)
        assert isinstance(store, HostStore)
        return LyingStore(store._records)

    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        if self.way == "raises in lookup":
            raise RuntimeError("no")
        return len(block_hashes) + 7 if self.way == "claims more" else super().lookup(block_hashes, transfer)


class Small(Host):
    """Host memory for five blocks."""

    @classmethod
    def open_store(cls, options: HostOptions, setup: StoreSetup) -> BlockStore:
        return HostStore(RecentRecords(5 * setup.record_bytes))


class LyingStore(HostStore):
    last: bytes | None = None

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | bytearray | None:
        found, way = super().read(block_hash, transfer), Liar.way
        if found is None or way in ("claims more", "raises in lookup"):
            return found
        if way == "":
            return copied(found)
        if way == "raises":
            raise OSError("the disk is gone")
        if way == "never answers":
            Liar.waits.set()
            Liar.gate.wait()
            return copied(found)
        if way == "another block":
            found, self.last = self.last or bytes(len(found)), found
            return found
        broken = {
            "garbage": bytes(len(found)),
            "torn": found[: len(found) // 2],
            "one bit": found[:-1] + bytes([found[-1] ^ 1]),
            "too long": found + b"\0",
            "nothing": b"",
        }
        return broken[way]


def copied(record: bytes) -> Copy:
    """A record of which the test knows whether somebody holds it."""
    copy = Copy(record)
    Liar.copies.append(weakref.ref(copy))
    return copy


def no_copy_is_held() -> bool:
    return all(copy() is None for copy in Liar.copies)


@pytest.fixture
def make_liar(make_llm: Callable[..., LLM]) -> Callable[[float], LLM]:
    """Makes an engine with a liar that is waited for so many seconds."""
    Liar.way = ""
    Liar.copies.clear()
    Liar.gate.clear()
    Liar.waits.clear()
    return lambda load_seconds: make_llm(kv_connector={"name": f"{__name__}:Liar", "load_seconds": load_seconds})


@pytest.fixture
def liar(make_liar: Callable[[float], LLM]) -> LLM:
    return make_liar(60)


def test_a_prompt_is_found_on_disk_after_a_restart(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    connector = {"name": "disk", "path": str(tmp_path)}
    _, expected = tokens_of(make_llm())
    first = make_llm(kv_connector=connector)
    assert tokens_of(first) == (0, expected)
    first.shutdown()
    again = make_llm(kv_connector=connector)
    assert tokens_of(again) == (FULL, expected)
    assert counts(again).num_hit_tokens == FULL
    longer = [*PROMPT[:FULL], *range(40)]
    found, got = tokens_of(again, longer)
    again.shutdown()
    # Another engine has the first one's blocks and those of the longer prompt.
    assert (found, tokens_of(make_llm(kv_connector=connector), longer)) == (FULL, (FULL + 36, got))


def test_what_another_engine_removed_is_saved_again(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Whether its blocks were computed here or loaded: nobody says that they are gone."""
    connector = {"name": "disk", "path": str(tmp_path)}
    first = make_llm(kv_connector=connector)
    expected = tokens_of(first)
    saved(first)
    again = make_llm(kv_connector=connector)
    assert tokens_of(again)[0] == FULL
    files = set(tmp_path.rglob("*.kv"))
    for llm in (first, again):
        for file in tmp_path.rglob("*.kv"):
            file.unlink()
        llm.reset_prefix_cache()
        assert tokens_of(llm) == expected
        llm.engine.tokens.exchange.settle()
        assert set(tmp_path.rglob("*.kv")) == files


def test_blocks_that_did_not_stay_are_saved_again(make_llm: Callable[..., LLM]) -> None:
    """A prompt that alone is larger than the store: some of its blocks are written and removed at once."""
    llm = make_llm(kv_connector=f"{__name__}:Small")
    first = replace(GREEDY, max_tokens=1)
    for _ in range(3):
        before = counts(llm).num_saved_blocks
        llm.generate([{"prompt_token_ids": PROMPT}], first)
        saved(llm)
        assert counts(llm).num_saved_blocks >= before + FULL // BLOCK_SIZE - 5


def test_a_disk_that_refuses_is_warned_of_once_and_tried_again(
    make_llm: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(kv_connector={"name": "disk", "path": str(tmp_path), "retry_seconds": 0})
    (own,) = tmp_path.glob("*/0")
    own.rmdir()
    own.write_text("no folder")
    expected = tokens_of(llm)
    saved(llm)
    assert counts(llm).num_failures > FULL // BLOCK_SIZE
    (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert f"nothing is saved in {tmp_path} for 0 s: [Errno 20] Not a directory" in warning.getMessage()
    own.unlink()
    own.mkdir()
    assert tokens_of(llm) == expected
    saved(llm)
    assert tokens_of(llm) == (FULL, expected[1])
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


def test_other_weights_find_nothing(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Nor another dtype, nor another config of the model: their blocks are in other folders."""
    connector = {"name": "disk", "path": str(tmp_path)}
    tokens_of(first := make_llm(kv_connector=connector))
    first.shutdown()
    for model in ({"dtype": "bfloat16"}, {"hf_overrides": {"rope_theta": 5000.0}}):
        assert tokens_of(make_llm(kv_connector=connector, model=model))[0] == 0


def test_an_update_of_the_weights_makes_all_blocks_unfindable(make_llm: Callable[..., LLM], tiny_llama: Any) -> None:
    llm = make_llm(kv_connector={"name": "host", "size_gib": 0.1}, weight_transport="in_process")
    tokens_of(llm)
    llm.engine.tokens.exchange.settle()
    llm.init_weight_transfer_engine()
    llm.start_weight_update()
    llm.update_weights({"weights": {name: 1.5 * weight for name, weight in tiny_llama[1].state_dict().items()}})
    llm.finish_weight_update()
    found, expected = tokens_of(llm)
    assert found == 0
    saved(llm)
    assert tokens_of(llm) == (FULL, expected)


def test_whatever_a_store_returns_the_tokens_stay(liar: LLM) -> None:
    _, expected = tokens_of(liar)
    for way in ("garbage", "torn", "one bit", "too long", "nothing", "another block"):
        saved(liar)
        before = counts(liar).num_corrupt
        Liar.way = way
        assert tokens_of(liar) == (0, expected), way
        assert counts(liar).num_corrupt == before + 1, way
        Liar.way = ""
        saved(liar)
        tokens_of(liar)  # what was broken is saved again
    saved(liar)
    assert tokens_of(liar) == (FULL, expected)


def test_a_connector_may_claim_more_than_it_has(liar: LLM) -> None:
    _, expected = tokens_of(liar)
    saved(liar)
    Liar.way = "claims more"
    assert tokens_of(liar) == (FULL, expected)
    found, _ = tokens_of(liar, [*PROMPT[:40], *range(60)])
    assert found == 40


def test_a_store_that_raises_costs_a_computation(liar: LLM) -> None:
    _, expected = tokens_of(liar)
    saved(liar)
    Liar.way = "raises"
    assert tokens_of(liar) == (0, expected)
    assert counts(liar).num_failures == 1


def test_a_store_that_never_answers_is_waited_for_once(make_liar: Callable[[float], LLM]) -> None:
    """The next requests do not wait behind the load that hangs; when it ends, loads begin again."""
    liar = make_liar(0.2)
    _, expected = tokens_of(liar)
    saved(liar)
    Liar.way = "never answers"
    assert tokens_of(liar) == (0, expected)
    assert counts(liar).num_timeouts == 1
    llm_hits = counts(liar).num_hit_tokens
    liar.reset_prefix_cache()
    assert tokens_of(liar) == (0, expected)
    assert (counts(liar).num_timeouts, counts(liar).num_hit_tokens) == (1, llm_hits)
    Liar.way = ""
    Liar.gate.set()

    def is_found_again() -> bool:
        liar.reset_prefix_cache()
        return tokens_of(liar) == (FULL, expected)

    wait_until(is_found_again, "loads begin after the one that hung has ended")


def test_a_connector_that_raises_is_switched_off(liar: LLM) -> None:
    _, expected = tokens_of(liar)
    saved(liar)
    Liar.way = "raises in lookup"
    assert tokens_of(liar) == (0, expected)
    Liar.way = ""
    saved(liar)
    assert tokens_of(liar) == (0, expected)


def test_metrics_show_what_became_of_records(make_llm: Callable[..., LLM]) -> None:
    Liar.way = ""
    llm = make_llm(kv_connector=f"{__name__}:Liar", telemetry=["prometheus"])

    def metric(name: str) -> float:
        (line,) = [one for one in llm.engine.metrics().body.decode().splitlines() if one.startswith(f"{name}{{")]
        return float(line.rpartition(" ")[2])

    tokens_of(llm)
    saved(llm)
    tokens_of(llm)
    loaded = FULL // BLOCK_SIZE
    assert metric("dovetail:kv_connector_saved_blocks_total") >= loaded
    assert metric("dovetail:kv_connector_loaded_blocks_total") == loaded
    assert metric("vllm:external_prefix_cache_hits_total") == FULL
    for way in ("raises", "one bit"):
        Liar.way = way
        saved(llm)
        tokens_of(llm)
    assert metric("dovetail:kv_connector_failed_records_total") == 1
    assert metric("dovetail:kv_connector_corrupt_records_total") == 1
    assert metric("dovetail:kv_connector_on") == 1
    Liar.way = "raises in lookup"
    saved(llm)
    tokens_of(llm)
    assert metric("dovetail:kv_connector_on") == 0


def test_an_idle_engine_asks_again_for_blocks_that_are_being_copied(make_llm: Callable[..., LLM]) -> None:
    """On a device that has not done the copy when the last step ends."""
    executor = {"name": "gpu", "device": "null", "null_order": "late"}
    llm = make_llm(executor=executor, kv_connector={"name": "host", "size_gib": 0.1})
    llm.generate([{"prompt_token_ids": PROMPT}], replace(GREEDY, max_tokens=1))
    exchange = llm.engine.tokens.exchange
    assert not exchange.statistics.num_saved_blocks
    wait_until(lambda: exchange.is_due, "the engine asks again")
    llm.sleep(1)
    assert not exchange.is_due, "the step loop of an engine that sleeps would not rest"
    llm.wake_up()
    saved(llm)
    assert exchange.statistics.num_saved_blocks >= FULL // BLOCK_SIZE


def test_no_record_is_held_once_its_blocks_are_placed_or_nobody_waits_for_them(liar: LLM) -> None:
    """Not even by a load that ends after the connector was switched off."""
    _, expected = tokens_of(liar)
    saved(liar)
    assert tokens_of(liar) == (FULL, expected)
    assert len(Liar.copies) == FULL // BLOCK_SIZE
    wait_until(no_copy_is_held, "the reader is done with them")
    saved(liar)
    Liar.way = "never answers"
    liar.engine.add_request("waits", {"prompt_token_ids": PROMPT}, GREEDY)
    liar.engine.step()
    assert Liar.waits.wait(60)
    Liar.way = "raises in lookup"
    assert len(liar.generate([{"prompt_token_ids": PROMPT[::-1]}], GREEDY)[0].outputs[0].token_ids) == 8
    Liar.way = ""
    Liar.gate.set()
    wait_until(lambda: len(Liar.copies) > FULL // BLOCK_SIZE, "the load goes on")
    wait_until(no_copy_is_held, "the load ends")


def test_a_request_may_be_aborted_while_its_blocks_are_loaded(liar: LLM) -> None:
    _, expected = tokens_of(liar)
    saved(liar)
    Liar.way = "never answers"
    engine = liar.engine
    engine.add_request("gone", {"prompt_token_ids": PROMPT}, GREEDY)
    engine.step()
    assert Liar.waits.wait(60)
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()
    Liar.way = ""
    Liar.gate.set()
    assert tokens_of(liar)[1] == expected


def test_blocks_of_evicted_prompts_come_back(make_llm: Callable[..., LLM]) -> None:
    """With memory for two prompts, four in turns, several at once: preempted, evicted, loaded."""
    prompts = [[(start + 5 * i * i) % 128 for i in range(90)] for start in range(4)]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [out.outputs[0].token_ids for out in make_llm().generate(asked, GREEDY)]
    small = make_llm(
        model={"max_model_len": 128},
        cache={"num_blocks": 56},
        kv_connector={"name": "host", "size_gib": 0.1},
        scheduler={"max_num_seqs": 4},
    )
    for _ in range(3):
        for group in (asked[:2], asked[2:], asked):
            outputs = small.generate(group, GREEDY)
            assert [out.outputs[0].token_ids for out in outputs] == expected[asked.index(group[0]) :][: len(group)]
            small.engine.tokens.exchange.settle()
    assert counts(small).num_hit_tokens > 0


def test_prefill_in_one_engine_and_decode_in_another(make_llm: Callable[..., LLM]) -> None:
    """The first output says where the blocks are. When that engine is gone, they are computed."""
    _, expected = tokens_of(make_llm())
    port = free_ports()
    peer = f"127.0.0.1:{port}"
    prefill = make_llm(kv_connector={"name": "peer", "role": "producer", "port": port})
    decode = make_llm(kv_connector={"name": "peer", "role": "consumer", "peers": [peer]})
    first = SamplingParams(temperature=0, max_tokens=1, extra={"kv_transfer_params": {"do_remote_decode": True}})
    found = prefill.generate([{"prompt_token_ids": PROMPT}], first)[0].kv_transfer_params
    assert found is not None
    assert (found["remote_host"], found["remote_port"], found["do_remote_prefill"]) == ("127.0.0.1", port, True)
    assert tokens_of(decode, extra={"kv_transfer_params": found}) == (FULL, expected)
    prefill.shutdown()
    decode.reset_prefix_cache()
    assert tokens_of(decode, extra={"kv_transfer_params": found}) == (0, expected)
    assert decode.generate([{"prompt_token_ids": PROMPT}], first)[0].kv_transfer_params is None


def test_a_producer_says_how_it_is_reached(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match="set announced_host"):
        make_llm(kv_connector={"name": "peer", "role": "producer", "host": "0.0.0.0"})


def test_sleep_loses_nothing_that_was_saved(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(kv_connector={"name": "host", "size_gib": 0.1})
    _, expected = tokens_of(llm)
    llm.engine.tokens.exchange.settle()
    llm.sleep(1)
    llm.wake_up()
    assert tokens_of(llm) == (FULL, expected)


def test_windows_and_int8_pages(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    from dovetail.testing.tiny_models import save_tiny_model, tiny_config

    save_tiny_model(tmp_path, tiny_config("mistral", sliding_window=12, max_position_embeddings=512))
    for sections in ({"model": {"path": str(tmp_path)}}, {"cache": {"dtype": "int8"}}):
        llm = make_llm(**sections, kv_connector={"name": "host", "size_gib": 0.1})
        _, expected = tokens_of(llm)
        saved(llm)
        found, got = tokens_of(llm)
        assert (found > 0, got) == (True, expected)


def test_is_refused_without_a_prefix_cache(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector\.name .*: blocks are found by their content"):
        make_llm(cache={"prefix_caching": False}, kv_connector="host")
