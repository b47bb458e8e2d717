"""A checkpoint's module for multi-token prediction drafts what transformers' layers say by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.model import FURTHER_MODULE
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import DraftModel, DraftModelInfo, SpeculationNeed
from dovetail.plugins.model_families.deepseek import DeepseekFamily
from dovetail.spec_decode.mtp import MTPDrafter
from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite
from dovetail.testing.tiny_models import save_tiny_model, tiny_config, tiny_model

from .conftest import greedy
from .watched import RULES, Watched, rules, seeded

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 9, 13, 5, 9, 13, 5, 20, 21], [40, 41, 42], [7] * 30]
LOGGED = """
import json
from pathlib import Path

from dovetail.spec_decode.mtp import MTPDrafter, MTPOptions


class Options(MTPOptions):
    log: Path


class Logged(MTPDrafter):
    Options = Options

    def propose(self, batch):
        drafts = super().propose(batch)
        with self.options.log.open("a") as file:
            for request, draft in zip(batch.requests, drafts):
                if draft is not None:
                    print(json.dumps([request.token_ids.tolist(), list(draft.token_ids)]), file=file)
        return drafts
"""


class Module:
    """The module by hand, with transformers' decoder layer over whole texts."""

    def __init__(self, main: Any):
        self._main, config = main, main.config
        generator = torch.Generator().manual_seed(4)
        size = config.hidden_size
        self.layer: Any = DeepseekV3DecoderLayer(config, config.num_hidden_layers).eval()
        with torch.no_grad():
            for name, tensor in self.layer.state_dict().items():
                drawn = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.1 * drawn if "norm" in name else drawn * tensor.shape[-1] ** -0.5)
        self.norms = {
            name: 1 + 0.1 * torch.randn(size, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")
        }
        self.projection = torch.randn(size, 2 * size, generator=generator) * size**-0.5

    def tensors(self) -> dict[str, torch.Tensor]:
        """As checkpoints hold them, with the copies that these have."""
        prefix = f"model.layers.{self._main.config.num_hidden_layers}."
        named = {f"{prefix}{name}": tensor.clone() for name, tensor in self.layer.state_dict().items()}
        named |= {f"{prefix}{name}.weight": tensor for name, tensor in self.norms.items()}
        copies = {"embed_tokens": self._main.model.embed_tokens, "shared_head.head": self._main.lm_head}
        named |= {f"{prefix}{name}.weight": part.weight.detach().clone() for name, part in copies.items()}
        return named | {f"{prefix}eh_proj.weight": self.projection}

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._main.config.rms_norm_eps)
        return self.norms[name] * x * scale

    @torch.inference_mode()
    def guess(self, known: list[int], count: int) -> list[int]:
        """`count` tokens behind the known ones."""
        tokens = torch.tensor([known])
        # The norm behind the last layer is in what transformers calls the last hidden state.
        states = self._main.model(tokens).last_hidden_state[0, :-1]
        following = list(known[1:])
        guessed: list[int] = []
        while len(guessed) < count:
            embeds = self._main.model.embed_tokens(torch.tensor(following))
            x = torch.cat((self._norm("enorm", embeds), self._norm("hnorm", states)), -1) @ self.projection.T
            length = len(following)
            positions = torch.arange(length)[None]
            mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
            rotation = self._main.model.rotary_emb(x[None], positions)
            output = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            output = output[0] if isinstance(output, tuple) else output
            behind = output.reshape(length, -1)[-1]
            guessed.append(int(self._main.lm_head(self._norm("shared_head.norm", behind)).argmax()))
            following.append(guessed[-1])
            states = torch.cat((states, behind[None]))
        return guessed


def save(directory: Path) -> tuple[Any, Module]:
    """A tiny DeepSeek-V3 with one module behind its layers."""
    main: Any = save_tiny_model(directory, tiny_config("deepseek_v3"))
    module = Module(main)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | module.tensors(), directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return main, module


def create(directory: Path, keys: Mapping[str, Any] | None = None, **drafter: Any) -> LLM:
    section = {"name": "mtp", "path": str(directory), "num_tokens": 3, "length": "fixed", "quantization": None}
    return LLM(
        model={"path": str(directory), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        cache={"block_size": 4, "num_blocks": 40},
        scheduler={"max_num_batched_tokens": 12, "max_num_seqs": 3},
        speculative={"drafters": {"it": section | {"dtype": "float32"} | drafter}, **(keys or {})},
    )


def test_drafts_are_those_of_the_module_by_hand(tmp_path: Path) -> None:
    """Over prompts in chunks, a second time over cached prefixes; and the text is the main model's."""
    main, module = save(tmp_path)
    (tmp_path / "logged.py").write_text(LOGGED)
    log = tmp_path / "log.jsonl"
    with create(tmp_path, name=f"{tmp_path}/logged.py:Logged", log=str(log)) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert all(output.metrics.drafter_error is None for output in outputs)
            expected = [greedy(main, prompt, 12) for prompt in PROMPTS]
            assert [output.outputs[0].token_ids for output in outputs] == expected
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(entries) > 20
    for known, drafted in entries:
        assert drafted == module.guess(known, len(drafted))


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.nightly)])
def test_drawn_drafts_keep_the_distribution(tmp_path: Path, rule: str) -> None:
    """As in test_lossless_drawn.py."""
    save(tmp_path)
    params = seeded(SamplingParams(temperature=1.4, max_tokens=30, ignore_eos=True), 24)
    with create(tmp_path, rules(tmp_path / "seen.f64")) as llm:
        run = Watched(llm, tmp_path / "seen.f64").run("it", params, PROMPTS, acceptance=RULES[rule])
    run.assert_lossless()
    assert sum(output.metrics.num_accepted for output in run.outputs) > 0


def test_a_family_without_such_modules_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    with pytest.raises(ConfigError, match="gives no module 0 for multi-token prediction, but a model of 2 layers"):
        create(tmp_path)


def test_a_module_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match="gives no module 1 for multi-token prediction"):
        create(tmp_path, module=1)
    with pytest.raises(ConfigError, match=f"{FURTHER_MODULE} is 1, and the checkpoint has 1 such modules"):
        create(tmp_path, module=1, family="deepseek")


class TestMTP(PagedDraftWorkerSuite):
    plugin = MTPDrafter
    options: ClassVar[Mapping[str, Any]] = {"path": "made by the suite"}
    vocab_size = 50
    hidden_size = 64
    num_draws = 800

    def _config(self) -> dict[str, Any]:
        config = tiny_config("deepseek_v3", vocab_size=50, architectures=["DeepseekV3ForCausalLM"]).to_dict()
        self.hidden_size = config["hidden_size"]
        return config | {"num_nextn_predict_layers": 1, FURTHER_MODULE: 0}

    def need(self) -> SpeculationNeed:
        size = DeepseekFamily(PluginOptions()).size(self._config())
        return replace(super().need(), model=DraftModelInfo(self._config(), size, "float32"))

    def own_model(self) -> DraftModel:
        context = self.create_context()
        module = DeepseekFamily(PluginOptions()).create(self._config(), context)
        main: Any = tiny_model(tiny_config("deepseek_v3", vocab_size=self.vocab_size)).eval()
        weights = main.state_dict() | Module(main).tensors()
        module.load_weights(weights.items())
        return DraftModel(module, context.attention_layers, 256, vocab_size=self.vocab_size)


@pytest.mark.nightly
class TestMTPTrees(TestMTP):
    num_tokens = 7
    options: ClassVar[Mapping[str, Any]] = {"path": "made by the suite", "top_k": 2, "depth": 3}
