"""Plugins that were written for 1.0 work: each is installed as a distribution, passes the suite of its kind, and takes
part in a generation. The sources in v1/ are kept as they are for as long as a kind speaks major version 1."""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dovetail import SamplingParams
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.kinds import HOOKS_VERSION, KINDS
from dovetail.plugins.server.live import live_server
from dovetail.testing import (
    AcceptanceRuleSuite,
    AttentionBackendSuite,
    CommandSuite,
    DialectSuite,
    DraftLengthSuite,
    DraftWorkerSuite,
    ExecutorSuite,
    ExistingModel,
    GeneratingRouteSuite,
    GrammarSuite,
    HooksSuite,
    KVConnectorSuite,
    LogitsProcessorSuite,
    ModelFamilySuite,
    ModelSourceSuite,
    OperatorsSuite,
    PoolerSuite,
    QuantizationSuite,
    Quirk,
    RouterSuite,
    SavedCheckpoint,
    SchedulerSuite,
    TelemetrySinkSuite,
    WeightFormatSuite,
    WeightSender,
    WeightTransportSuite,
)
from dovetail.testing.tiny_models import read_config, read_weights

FROZEN_KINDS = {path.stem for path in (Path(__file__).parent / "v1").glob("*.py")}
PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 9], [40, 41, 42], [99]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="session")
def expected(tiny_llama) -> list[list[int]]:
    """What transformers generates."""
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        all_ids = tiny_llama[1].generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        outputs.append(all_ids[0, len(prompt) :].tolist())
    return outputs


def tokens_of(llm: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    with llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_every_kind_of_major_version_1_has_a_frozen_plugin():
    versions = {name: kind.version for name, kind in KINDS.items()} | {"hooks": HOOKS_VERSION}
    assert {name for name, version in versions.items() if version.major == 1} == FROZEN_KINDS


def test_all_are_found_and_load(frozen, dovetail):
    for kind in FROZEN_KINDS - {"hooks"}:
        assert frozen.load(kind, "frozen").contract == (1, 0)
    result = dovetail("plugins", "doctor", "frozen")
    rows = [line.split() for line in result.stdout.splitlines() if "dovetail-frozen-v1" in line]
    assert len(rows) == len(FROZEN_KINDS), result.stdout
    assert all("ok" in row for row in rows)


@pytest.mark.parametrize(
    "sections",
    [
        {"executor": {"name": "frozen"}},
        {"model": {"operators": "frozen"}},
        {"model": {"family": "frozen"}},
        {"scheduler": {"name": "frozen"}},
        {"attention": {"name": "frozen"}},
        {"speculative": {"drafters": {"mine": {"name": "frozen", "num_tokens": 4, "length": "fixed"}}}},
        {
            "speculative": {
                "drafters": {"mine": {"name": "ngram", "num_tokens": 4, "length": "fixed"}},
                "acceptance": {"name": "frozen"},
            }
        },
        {"speculative": {"drafters": {"mine": {"name": "ngram", "num_tokens": 4, "length": {"name": "frozen"}}}}},
    ],
    ids=(
        "executor",
        "operators",
        "family",
        "scheduler",
        "attention",
        "draft_worker",
        "acceptance_rule",
        "draft_length",
    ),
)
def test_generates_what_transformers_does(run, expected, sections):
    assert tokens_of(run(**sections)) == expected


@pytest.mark.parametrize("drafter", ["frozen", "ngram"])
def test_drafts_are_verified(run, expected, drafter):
    section = {"name": drafter, "num_tokens": 4, "length": {"name": "frozen", "most": 3}}
    with run(speculative={"drafters": {"mine": section}, "acceptance": {"name": "frozen"}}) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.metrics.drafter_error for output in outputs] == [None] * 3
    assert 0 < outputs[0].metrics.num_drafted <= 3 * outputs[0].metrics.num_draft_rounds


def test_quantization_rounds_the_layers_of_a_running_model(run, expected):
    whole = tokens_of(run(model={"quantization": {"name": "frozen"}}))
    assert [len(tokens) for tokens in whole] == [8, 8, 8]
    assert whole[0][0] == expected[0][0]


def test_a_logits_processor_bans_what_a_request_lists(run, expected):
    banned = expected[0][0]
    llm = run(logits_processors={"frozen": {"name": "frozen"}})
    with pytest.raises(RequestError, match="tokens are 0 to 127"):
        llm.generate([PROMPTS[0]], SamplingParams(processors={"frozen": [128]}), use_tqdm=False)
    params = [SamplingParams(temperature=0.0, max_tokens=8, processors={"frozen": [banned]}), GREEDY]
    with llm:
        first, second = llm.generate([PROMPTS[0], PROMPTS[0]], params, use_tqdm=False)
    assert banned not in first.outputs[0].token_ids
    assert second.outputs[0].token_ids == expected[0]


def test_a_pooler_makes_embeddings(run, tiny_llama):
    with run(pooling={"embed": "frozen"}) as llm, torch.no_grad():
        (output,) = llm.embed([PROMPTS[0]], use_tqdm=False)
        hidden = tiny_llama[1].model(torch.tensor([PROMPTS[0]])).last_hidden_state[0]
    mean = torch.arange(1.0, len(hidden) + 1) @ hidden
    assert torch.allclose(torch.tensor(output.outputs.embedding), mean / mean.norm(), atol=1e-5)


def test_a_telemetry_sink_hears_of_steps_and_requests(run, tmp_path):
    tokens_of(run(telemetry=[{"name": "frozen", "path": str(tmp_path / "sums")}]))
    assert (tmp_path / "sums").read_text() == f"3 {sum(map(len, PROMPTS))} 24"


def test_a_telemetry_sink_is_scraped(run, tmp_path):
    llm = run(telemetry=[{"name": "frozen", "path": str(tmp_path / "sums")}])
    block = llm.engine.config.cache.block_size
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.engine.metrics().body.decode().splitlines() == [
        "# TYPE frozen_tokens_total counter",
        f'frozen_tokens_total{{block_size="{block}"}} 24',
        "# TYPE frozen_running gauge",
        f'frozen_running{{block_size="{block}"}} 0',
    ]


def test_a_model_source_resolves_its_scheme(run, expected, tiny_llama):
    source = {"name": "frozen", "root": str(tiny_llama[0].parent)}
    assert tokens_of(run(model={"path": "frozen:llama", "source": source})) == expected


@pytest.fixture
def npz(tiny_llama, tmp_path) -> Path:
    """The model in a file that only the frozen weight format reads."""
    arrays = {name: tensor.numpy() for name, tensor in read_weights(tiny_llama[0])}
    np.savez(tmp_path / "model.npz", **arrays, **{"config.json": json.dumps(read_config(tiny_llama[0]))})
    return tmp_path / "model.npz"


def test_a_weight_format_reads_a_checkpoint(run, expected, npz):
    assert tokens_of(run(model={"path": str(npz)})) == expected


@pytest.mark.parametrize("call", ["config", "open"])
def test_what_a_weight_format_does_not_turn_into_a_model_error_is_its_fault(run, frozen, npz, monkeypatch, call):
    weight_format = frozen.load("weight_format", "frozen")
    monkeypatch.setattr(weight_format, call, lambda self, files: np.load(files.path / "no-file"))
    with pytest.raises(PluginError, match=f"weight_format 'frozen': its {call} failed with NotADirectoryError"):
        run(model={"path": str(npz)})


def test_one_engine_of_all_of_them_generates_what_transformers_does(run, expected, npz, tmp_path):
    """But quantization, which rounds."""
    source = {"name": "frozen", "root": str(npz.parent)}
    drafter = {"name": "frozen", "num_tokens": 4, "length": {"name": "frozen"}}
    llm = run(
        model={"path": f"frozen:{npz.name}", "source": source, "family": "frozen", "operators": "frozen"},
        executor={"name": "frozen"},
        scheduler={"name": "frozen"},
        attention={"name": "frozen"},
        speculative={"drafters": {"mine": drafter}, "acceptance": {"name": "frozen"}},
        logits_processors={"frozen": {"name": "frozen"}},
        telemetry=[{"name": "frozen", "path": str(tmp_path / "sums")}],
    )
    assert tokens_of(llm) == expected
    assert (tmp_path / "sums").read_text() == f"3 {sum(map(len, PROMPTS))} 24"


def test_hooks_hear_of_the_engine_and_its_requests(run, expected):
    from dovetail_frozen_v1.hooks import heard

    heard.clear()
    params = SamplingParams(temperature=0.0, max_tokens=8, extra={"tenant": "acme", "held": True})
    assert tokens_of(run(), params) == expected
    assert heard == [("started", "float32", "CPUExecutor"), *[("request", "acme")] * 3, ("stopped",)]


def test_a_dialect_reads_what_it_writes_and_refuses_what_it_reserves(frozen):
    from dovetail.contracts.dialect import AssistantMessage, DialectRequest, DialectSetup, Tool, ToolCall, message_of

    dialect_class = frozen.load("dialect", "frozen")
    dialect = dialect_class(dialect_class.Options(reserved="exit"), DialectSetup(special_tokens={"^": 7}))
    message = AssistantMessage(reasoning="why", content="so", calls=(ToolCall(name="add", arguments='{"a": 1}'),))
    parser = dialect.parser(DialectRequest(tools=(Tool(name="add"),)))
    events = parser.push(dialect.render_message(message))
    assert message_of([*events, *parser.finish()]) == message
    assert dialect.kept_tokens == {"^"}
    with pytest.raises(RequestError, match="exit is reserved"):
        dialect.validate(DialectRequest(tools=(Tool(name="exit"),)))


def test_a_command_runs_and_its_errors_are_messages(dovetail):
    assert dovetail("frozen", "you").stdout == "hello you\n"
    result = dovetail("frozen", "nobody")
    assert (result.returncode, "nobody cannot be greeted" in result.stderr) == (2, True)


@pytest.fixture(autouse=True, scope="module")
def _classes(frozen: Any) -> None:
    """Suites name classes that can be imported only while the distribution is installed."""
    from dovetail_frozen_v1 import hooks

    TestExecutor.plugin = frozen.load("executor", "frozen")
    TestModelFamily.plugin = frozen.load("model_family", "frozen")
    TestOperators.plugin = frozen.load("operators", "frozen")
    TestQuantization.plugin = frozen.load("quantization", "frozen")
    TestAttention.plugin = frozen.load("attention_backend", "frozen")
    TestScheduler.plugin = frozen.load("scheduler", "frozen")
    TestDrafter.plugin = frozen.load("draft_worker", "frozen")
    TestRule.plugin = frozen.load("acceptance_rule", "frozen")
    TestLength.plugin = frozen.load("draft_length", "frozen")
    TestRoute.plugin = frozen.load("route", "frozen")
    TestTelemetrySink.plugin = frozen.load("telemetry_sink", "frozen")
    TestCommand.plugin = frozen.load("command", "frozen")
    TestHooks.plugin = hooks
    TestLogitsProcessor.plugin = frozen.load("logits_processor", "frozen")
    TestPooler.plugin = frozen.load("pooler", "frozen")
    TestKVConnector.plugin = frozen.load("kv_connector", "frozen")
    TestRouter.plugin = frozen.load("router", "frozen")
    TestDialect.plugin = frozen.load("dialect", "frozen")
    TestGrammar.plugin = frozen.load("grammar", "frozen")
    TestModelSource.plugin = frozen.load("model_source", "frozen")
    TestWeightFormat.plugin = frozen.load("weight_format", "frozen")
    TestWeightTransport.plugin = frozen.load("weight_transport", "frozen")


class TestExecutor(ExecutorSuite):
    pass


class TestModelFamily(ModelFamilySuite):
    pass


class TestOperators(OperatorsSuite):
    pass


class TestQuantization(QuantizationSuite):
    tolerance = 0.02


class TestAttention(AttentionBackendSuite):
    pass


class TestScheduler(SchedulerSuite):
    pass


class TestDrafter(DraftWorkerSuite):
    pass


class TestRule(AcceptanceRuleSuite):
    pass


class TestTelemetrySink(TelemetrySinkSuite):
    @pytest.fixture
    def options(self, tmp_path):
        return {"path": tmp_path / "sums"}


class TestCommand(CommandSuite):
    works = (["world"],)
    refused = (["nobody"], [])


class TestHooks(HooksSuite):
    pass


class TestLogitsProcessor(LogitsProcessorSuite):
    request_options = (None, (3, 5), tuple(range(20)))
    refused_options = ((64,), (-1,))


class TestPooler(PoolerSuite):
    pass


class TestKVConnector(KVConnectorSuite):
    small_options: ClassVar[Mapping[str, Any]] = {"most": 5}


class TestRouter(RouterSuite):
    pass


class TestLength(DraftLengthSuite):
    pass


class TestRoute(GeneratingRouteSuite):
    serve = staticmethod(live_server)
    path = "/frozen"
    end_of_stream = b"data: end\n\n"

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {"text": prompt}


class TestDialect(DialectSuite):
    pass


class TestGrammar(GrammarSuite):
    pass


def published(reason: str) -> Quirk:
    """Of a plugin that stays as it was published."""
    return Quirk(reason=f"published before the suite: {reason}", expires="2.0")


class TestModelSource(ModelSourceSuite):
    # What is too long for a path raised OSError from Path.exists until Python 3.14.
    raising = () if sys.version_info >= (3, 14) else ("a long name", "many parts")
    quirks: ClassVar[Mapping[str, Quirk]] = {
        "test_no_revision_is_ignored": published("it takes any revision"),
        **{f"test_refuses_odd_references[{name}]": published("it raises OSError") for name in raising},
    }

    @pytest.fixture
    def existing(self, tmp_path):
        # Long, so that a reference of many parts is too long for a path on every machine.
        root = tmp_path / "models" / ("m" * 120)
        (root / "llama").mkdir(parents=True)
        return ExistingModel("llama", options={"root": root})


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
class TestWeightFormat(WeightFormatSuite):
    quirks: ClassVar[Mapping[str, Quirk]] = {
        name: published("it raises what numpy and zipfile raise")
        for name in (
            *("test_refuses_others", "test_refuses_unknown_names"),
            *("test_refuses_what_is_cut_off", "test_refuses_missing_files"),
        )
    }

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _closed(cls):
        """The frozen format leaves files open that it refuses, and may not be changed any more. What is left of them is
        collected here, where no later test is blamed."""
        yield
        for name in ("last_value", "last_traceback", "last_exc"):
            setattr(sys, name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    @pytest.fixture
    def saved(self, tmp_path):
        config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}
        tensors = {f"model.layers.{layer}.weight": torch.randn(4, 8) for layer in range(3)}
        path = tmp_path / "checkpoint" / "model.npz"
        path.parent.mkdir()
        np.savez(
            path, **{name: tensor.numpy() for name, tensor in tensors.items()}, **{"config.json": json.dumps(config)}
        )
        return SavedCheckpoint(path, config, tensors)


class Shelf(WeightSender):
    def __init__(self, folder):
        self._name = str(folder)
        self._count = 0

    def connect(self, num_ranks):
        return {"shelf": self._name}

    def send(self, tensors):
        from dovetail_frozen_v1.weight_transport import SHELF

        self._count += 1
        SHELF[f"{self._name}/{self._count}"] = tensors
        return {"bucket": self._count}


class TestWeightTransport(WeightTransportSuite):
    create_sender = Shelf


def test_a_transport_brings_other_weights(run, tiny_llama, expected):
    shelf = Shelf("shelf")
    weights = dict(read_weights(tiny_llama[0]))
    changed = weights | {"model.norm.weight": torch.zeros(64)}
    with run(weight_transport={"name": "frozen"}) as llm:
        llm.init_weight_transfer_engine(shelf.connect(1))
        for sent, tokens in ((changed, [[0] * 8] * 3), (weights, expected)):
            llm.start_weight_update()
            llm.update_weights(shelf.send(sent))
            llm.finish_weight_update()
            found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in found] == tokens
