"""The text of models for images, against transformers' whole model, on random checkpoints in float32."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.commands.main import main
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.llama4 import Llama4Family
from dovetail.plugins.model_families.wrappers import text_model
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.tiny_models import read_config, read_weights, save_tiny_model, tiny_wrapper_config

CASES: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "gemma3": (GemmaFamily, "gemma3", "gemma3_text", {}),
    "llama4": (Llama4Family, "llama4", "llama4_text", {}),
    "mistral3": (LlamaFamily, "mistral3", "mistral", {"tie_word_embeddings": False, "sliding_window": None}),
    "mistral3 tied": (LlamaFamily, "mistral3", "mistral", {"sliding_window": None}),
    "llava llama": (LlamaFamily, "llava", "llama", {}),
    "llava mistral": (LlamaFamily, "llava", "mistral", {"sliding_window": 8}),
    "llava tied": (LlamaFamily, "llava", "qwen2", {"tie_word_embeddings": True}),
}


class Case:
    """A family, a saved model for images and text, and transformers' own."""

    def __init__(self, name: str, directory: Path):
        self.family, model_type, text_type, overrides = CASES[name]
        self.directory = directory
        self.oracle = save_tiny_model(directory, tiny_wrapper_config(model_type, text_type, **overrides))
        self.config = read_config(directory)
        self.old_names = dict(read_weights(directory))
        is_tied = not any(name.endswith("lm_head.weight") for name in self.old_names)
        self.new_names = {
            name: tensor.detach().clone()
            for name, tensor in self.oracle.state_dict().items()
            if not (is_tied and name == "lm_head.weight")
        }

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.oracle(input_ids=torch.tensor([token_ids])).logits[0]

    def harness(self, weights: dict[str, torch.Tensor]) -> ModelHarness:
        return ModelHarness(self.family(self.family.Options()), self.config, weights.items(), ReferenceBackend)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("wrapper"))


def test_logits_equal_those_of_transformers_under_both_layouts(case: Case, prompt: list[int]) -> None:
    expected = case.logits(prompt)
    assert any(name.startswith("language_model.model.") for name in case.old_names)
    for weights in (case.old_names, case.new_names):
        torch.testing.assert_close(case.harness(weights).logits(prompt, chunk=7), expected, rtol=0, atol=2e-5)


def test_the_tensors_for_images_are_left_out_with_one_sentence(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dovetail"):
        case.harness(case.old_names)
    (record,) = caplog.records
    assert "no part of the model are left out" in record.getMessage()
    assert "multi_modal_projector" in record.getMessage()


def test_a_missing_tensor_of_the_text_model_is_refused(case: Case) -> None:
    gone = "model.layers.1.self_attn.v_proj.weight"
    weights = {name: tensor for name, tensor in case.old_names.items() if not name.endswith(gone)}
    with pytest.raises(ModelError, match=f"missing .*{gone}"):
        case.harness(weights)


def test_it_generates_where_explain_accepts_it(
    case: Case, prompt: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model": {"path": str(case.directory), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 80},
        "cache": {"block_size": 4, "num_blocks": 200},
        "executor": {"threads": 1},
    }
    (tmp_path / "engine.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.argv", ["dovetail", "explain", str(tmp_path / "engine.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "the text model alone is served" in " ".join(capsys.readouterr().out.split())
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(case.logits(ids)[-1].argmax()))
    with LLM(config=config) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == ids[len(prompt) :]


def test_an_output_layer_beside_an_embedding_that_is_said_to_be_tied_is_used(tmp_path: Path, prompt: list[int]) -> None:
    case = Case("mistral3", tmp_path)
    config = {key: value for key, value in case.config.items() if key != "tie_word_embeddings"}
    config["text_config"] = config["text_config"] | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(case.new_names, tmp_path / "model.safetensors")
    expected = int(case.logits(prompt)[-1].argmax())
    with LLM(str(tmp_path), tokenizer_mode="none", dtype="float32", max_model_len=80) as llm:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == [expected]


def test_keys_that_a_text_config_leaves_out_have_the_defaults_of_its_type() -> None:
    """As the configs of Gemma 3 4B and LLaVA 1.5 do."""
    gemma = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    gemma |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    whole = text_model({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": gemma})
    assert (whole["num_attention_heads"], whole["head_dim"], whole["vocab_size"]) == (8, 256, 262208)
    assert whole["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert whole["tie_word_embeddings"] is True
    llava = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    whole = text_model(llava)
    assert (whole["hidden_size"], whole["num_hidden_layers"], whole["num_attention_heads"]) == (4096, 32, 32)


def test_a_text_model_that_is_not_served_is_named() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "opt"}}
    (reason,) = reasons_against(
        LlamaFamily,
        ModelNeed(config=config, tensor_parallel=1, device_type="cpu", dtype="float32"),
        LlamaFamily.Options(),
        Environment("cpu", num_cpus=1, memory_bytes=1),
    )
    assert "of type 'opt'" in reason
