"""Names and modules of vLLM: those that are there, and the sentences for those that are not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pytest

import dovetail
import dovetail.vllm
from dovetail.contracts.errors import ConfigError
from dovetail.vllm import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser


def test_every_name_resolves() -> None:
    assert dovetail.vllm.__all__ == sorted(dovetail.vllm.__all__)
    assert all(getattr(dovetail.vllm, name) is not None for name in dovetail.vllm.__all__)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("sampling_params", ["SamplingParams", "BeamSearchParams", "RequestOutputKind", "SamplingType"]),
        ("inputs", ["TextPrompt", "TokensPrompt", "PromptType"]),
        ("outputs", ["RequestOutput", "CompletionOutput"]),
        ("pooling_params", ["PoolingParams"]),
        ("engine.arg_utils", ["EngineArgs", "AsyncEngineArgs"]),
        ("engine.llm_engine", ["LLMEngine"]),
        ("engine.async_llm_engine", ["AsyncLLMEngine"]),
        ("entrypoints.llm", ["LLM"]),
        ("v1.engine.async_llm", ["AsyncLLM"]),
        ("v1.metrics.reader", ["Counter", "Gauge", "Histogram", "Vector"]),
        ("logger", ["init_logger"]),
        ("distributed", ["cleanup_dist_env_and_memory"]),
        ("utils", ["FlexibleArgumentParser", "random_uuid"]),
    ],
)
def test_modules_are_where_vllm_has_them(module: str, names: list[str]) -> None:
    found = import_module(f"dovetail.vllm.{module}")
    assert [name for name in names if name not in vars(found)] == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("from dovetail.vllm.lora.models import LoRAModel", "module lora.models is not in Dovetail: .*LoRARequest"),
        ("from dovetail.vllm.assets.image import ImageAsset", "text only"),
        ("import dovetail.vllm.envs", "settings are in the config"),
        ("from dovetail.vllm.config import KVTransferConfig", "not sent between engines yet"),
        ("from dovetail.vllm.config import VllmConfig", "no config objects"),
        ("from dovetail.vllm.config import PoolerConfig", "the section `pooling` names a pooler for each task"),
        ("from dovetail.vllm.utils import cdiv", "cdiv is not in Dovetail"),
        ("from dovetail.vllm.v1.sample.logits_processor import LogitsProcessor", "section logits_processors"),
        (
            "from dovetail.vllm.distributed.parallel_state import get_world_group",
            "distributed.parallel_state is not in",
        ),
        ("from dovetail.vllm import ModelRegistry", "dovetail.contracts.model.ModelFamily"),
        ("from dovetail.vllm import EngineArg", "what it has of vLLM's names is in dovetail.vllm.__all__"),
        ("from dovetail.vllm.nowhere import anything", "dovetail.vllm has no 'nowhere'"),
        ("from dovetail import EngineArgs", "^EngineArgs is in dovetail.vllm: from dovetail.vllm import EngineArgs$"),
        ("from dovetail import LLMM", "cannot import name 'LLMM'"),
        ("from dovetail.vllm.sampling_params import Foo", "^vLLM's Foo is not in Dovetail"),
        ("import dovetail.sampling_params", "import dovetail.vllm.sampling_params$"),
        ("import dovetail.entrypoints.llm", "import dovetail.vllm.entrypoints$"),
    ],
)
def test_what_is_missing_says_why(line: str, reason: str) -> None:
    with pytest.raises(ImportError, match=reason):
        exec(line)


def test_attributes_that_are_elsewhere_say_where() -> None:
    with pytest.raises(AttributeError, match=r"EngineArgs is in dovetail.vllm"):
        _ = dovetail.EngineArgs  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"ModelRegistry is not in Dovetail: .*ModelFamily"):
        _ = dovetail.vllm.ModelRegistry  # type: ignore[attr-defined]
    assert not hasattr(dovetail, "Nonsense")


def test_dovetail_does_not_import_it() -> None:
    modules = "dovetail.engine.llm, dovetail.engine.async_engine"
    code = f"import {modules}, sys; print([m for m in sys.modules if 'dovetail.vllm' in m])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_from_the_root_of_a_checkout_vllm_is_not_dovetails(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    code = "import importlib.util as u; s = u.find_spec('vllm'); print(s.origin if s else None)"
    assert str(root) not in subprocess.check_output([sys.executable, "-c", code], text=True, cwd=root)


def test_engine_args_are_keywords(tmp_path: Path) -> None:
    args = EngineArgs("./model", max_model_len=64, quantization=None, a_name_of_tomorrow=None)
    assert args.keywords() == {"model": "./model", "max_model_len": 64}
    assert asdict(args)["enable_lora"] is None
    with pytest.raises(TypeError, match="EngineArgs has no field 'max_model_lem': did you mean 'max_model_len'"):
        EngineArgs(max_model_lem=64)
    with pytest.raises(ConfigError, match="data_parallel_rank=2 is planned: the replicas of a server run"):
        AsyncEngineArgs(data_parallel_rank=2).create_engine_config()


def test_flags_take_underscores_switches_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("max-model-len: 32\nenforce_eager: true\nseed: 1\n")
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser).set_defaults(model="m")
    parser.add_argument("--own_flag", type=int, deprecated=True)
    line = ["--max_model_len=64", "--no-enable-prefix-caching", "--config", str(file), "--own_flag", "3"]
    found = parser.parse_args(line)
    expected = {"model": "m", "max_model_len": 64, "enable_prefix_caching": False, "enforce_eager": True, "seed": 1}
    assert EngineArgs.from_cli_args(found).keywords() == expected
    assert found.own_flag == 3
