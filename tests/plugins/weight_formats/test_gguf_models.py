"""Whole models through GGUF and back: what a converter wrote must come out as the checkpoint that went in.

Names go out by gguf's own table, and values by the rules of llama.cpp's converter, written down here once more.
"""

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant

from dovetail.contracts.errors import ModelError
from dovetail.contracts.weights import ModelFiles
from dovetail.plugins.weight_formats.gguf import GGUFFormat

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, type[Any], dict[str, Any]]] = {
    "llama": ("llama", transformers.LlamaConfig, {}),
    "llama tied": ("llama", transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama with biases": ("llama", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("llama", transformers.MistralConfig, {"sliding_window": 16}),
    "mixtral": ("llama", transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", transformers.Qwen2Config, {}),
    "qwen3": ("qwen3", transformers.Qwen3Config, {}),
    "qwen2moe": (
        "qwen2moe",
        transformers.Qwen2MoeConfig,
        {"num_experts": 4, "shared_expert_intermediate_size": 40, **MOE},
    ),
    "qwen3moe": ("qwen3moe", transformers.Qwen3MoeConfig, {"num_experts": 4, "norm_topk_prob": True, **MOE}),
    "gemma2": ("gemma2", transformers.Gemma2Config, {"query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gemma3": ("gemma3", transformers.Gemma3TextConfig, {"query_pre_attn_scalar": 8, "sliding_window": 16}),
}
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"} | {
    "gate_proj": "ffn_gate_exps",
    "down_proj": "ffn_down_exps",
    "up_proj": "ffn_up_exps",
}


def convert(
    architecture: str, config: Any, checkpoint: dict[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[np.ndarray, Quant]]]:
    """The checkpoint as llama.cpp's converter names and changes it."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in checkpoint.items():
        data = tensor.float().numpy()
        if ".experts." in name:
            layer, part = name.split(".")[2], name.split(".")[-2]
            experts.setdefault(f"blk.{layer}.{EXPERTS[part]}.weight", []).append(data)
            continue
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            data = (
                data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            )
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if name.endswith("shared_expert_gate.weight"):
            data = data.squeeze(0)
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        yield mapped, (np.ascontiguousarray(data), Quant.F32)
    for name, parts in experts.items():
        yield name, (np.stack(parts), Quant.F32)


def metadata(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SMALL["head_dim"],
        "attention.value_length": SMALL["head_dim"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    given = config.to_dict()
    optional = {
        "expert_count": given.get("num_experts") or given.get("num_local_experts"),
        "expert_used_count": given.get("num_experts_per_tok"),
        "attention.sliding_window": given.get("sliding_window"),
        "attn_logit_softcapping": given.get("attn_logit_softcapping"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
    }
    return values | {key: value for key, value in optional.items() if value}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, dict[str, torch.Tensor]]:
    """A random model of each kind: GGUF architecture, config and checkpoint as transformers saves it."""
    architecture, config_class, settings = MODELS[request.param]
    torch.manual_seed(0)
    config = config_class(**{"tie_word_embeddings": False, **SMALL, **settings})
    if architecture.startswith("gemma"):
        config.tie_word_embeddings = True
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "hf")
    from safetensors.torch import load_file

    return architecture, config, load_file(tmp_path / "hf" / "model.safetensors")


def test_the_checkpoint_comes_back(
    saved: tuple[str, Any, dict[str, torch.Tensor]],
    tmp_path: Path,
    write_gguf: Callable[..., ModelFiles],
    gguf_format: GGUFFormat,
) -> None:
    architecture, config, checkpoint = saved
    files = write_gguf(tmp_path / "m.gguf", architecture, metadata(config), dict(convert(*saved)))
    reader = gguf_format.open(files)
    assert {info.name: info.shape for info in reader.infos()} == {
        name: tuple(tensor.shape) for name, tensor in checkpoint.items()
    }
    for name, tensor in reader.tensors():
        torch.testing.assert_close(tensor, checkpoint[name].float(), rtol=0, atol=1e-6, msg=name)


def test_the_config_comes_back(
    saved: tuple[str, Any, dict[str, torch.Tensor]],
    tmp_path: Path,
    write_gguf: Callable[..., ModelFiles],
    gguf_format: GGUFFormat,
) -> None:
    architecture, config, _ = saved
    files = write_gguf(tmp_path / "m.gguf", architecture, metadata(config), dict(convert(*saved)))
    found = dict(gguf_format.config(files))
    assert found.pop("generation_config")["eos_token_id"] == [2]
    assert found["architectures"] == [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    rebuilt = transformers.AutoConfig.for_model(**found).to_dict()
    expected = config.to_dict()
    token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    # llama.cpp's metadata does not carry these, or they only say how the file came to be.
    ignored = {*token_ids, "architectures", "dtype", "initializer_range", "max_window_layers", "transformers_version"}
    for key in expected.keys() - ignored:
        assert (
            rebuilt[key] == pytest.approx(expected[key])
            if isinstance(expected[key], float)
            else (rebuilt[key] == expected[key])
        ), key


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_rope_scaling(scaling: dict[str, Any], expected: Any, tiny_model: Any, gguf_format: GGUFFormat) -> None:
    assert gguf_format.config(tiny_model(values=scaling)).get("rope_scaling") == expected


def test_llama3_scaling_is_recovered_from_its_divisors(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    parameters = {"rope_theta": 500000.0, **scaling}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** -(torch.arange(0, 64, 2).float() / 64)
    divisors = (plain / scaled).numpy()
    values = {"rope.freq_base": 500000.0}
    files = tiny_model({"rope_freqs.weight": (divisors, Quant.F32)}, values)
    assert gguf_format.config(files)["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in {info.name for info in gguf_format.open(files).infos()}
    foreign = tiny_model({"rope_freqs.weight": (divisors[::-1].copy(), Quant.F32)}, values, name="foreign.gguf")
    with pytest.raises(ModelError, match="is not Llama 3's RoPE scaling"):
        gguf_format.config(foreign)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("mamba", {}, r"architecture 'mamba' is not supported; supported: gemma2, gemma3, llama, qwen2"),
        ("llama", {"rope.dimension_count": 32}, "only part of each head is rotated"),
        ("llama", {"attention.head_count_kv": [1, 2]}, "differs between layers"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope' is not served"),
        ("qwen3moe", {"expert_count": 2, "expert_used_count": 1}, "no expert tensors"),
        ("llama", {"block_count": 2**31}, r"says 2147483648 for llama\.block_count, and the file has 1 tensors"),
        ("gemma3", {"block_count": 2**31}, r"says 2147483648 for gemma3\.block_count"),
        ("llama", {"embedding_length": 2**31}, r"says 2147483648 for llama\.embedding_length.* has 256 rows"),
        ("llama", {"attention.head_count": math.nan}, r"says nan for llama\.attention\.head_count"),
        ("llama", {"attention.head_count": 0.5}, r"says 0\.5 for llama\.attention\.head_count"),
        ("llama", {"attention.layer_norm_rms_epsilon": math.inf}, "says inf for"),
    ],
)
def test_what_cannot_be_served_is_refused(
    architecture: str, values: dict[str, Any], message: str, tiny_model: Any, gguf_format: GGUFFormat
) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_format.config(tiny_model(values=values, architecture=architecture))


def test_missing_metadata_and_tensors_are_named(
    tmp_path: Path, write_gguf: Callable[..., ModelFiles], tiny_values: Any, gguf_format: GGUFFormat
) -> None:
    with pytest.raises(ModelError, match="it is not a whole language model"):
        gguf_format.config(write_gguf(tmp_path / "a.gguf", "llama", tiny_values))
    embeddings = {"token_embd.weight": (np.zeros((8, 256), np.float32), Quant.F32)}
    partial = {key: value for key, value in tiny_values.items() if key != "context_length"}
    with pytest.raises(ModelError, match=r"lacks llama\.context_length"):
        gguf_format.config(write_gguf(tmp_path / "b.gguf", "llama", partial, embeddings))


def test_unknown_tensors_are_refused(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    files = tiny_model({"blk.0.attn_qkv.weight": (np.zeros((8, 256), np.float32), Quant.F32)})
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not have: blk\.0\.attn_qkv\.weight"):
        gguf_format.open(files)


def test_turn_enders_are_end_tokens_too(tiny_model: Any, gguf_format: GGUFFormat) -> None:
    values = {
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_end|>", "a", "b", "c", "d", "e", "<|im_end|> "],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 0,
    }
    config = gguf_format.config(tiny_model(values=values))
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert config["generation_config"] == {"bos_token_id": 0, "eos_token_id": [1, 0]}


def test_smollm2(smollm2: ModelFiles, gguf_format: GGUFFormat) -> None:
    config = gguf_format.config(smollm2)
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert "dtype" not in config
    reader = gguf_format.open(smollm2)
    assert len(reader.infos()) == 30 * 9 + 2
    norm = reader.read("model.norm.weight")
    assert norm.shape == (576,)
    assert norm.dtype == torch.float32


def test_arrays_within_arrays_within_arrays_are_refused(tmp_path: Path, gguf_format: GGUFFormat) -> None:
    depth = 10_000
    key = b"deep"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "deep.gguf").write_bytes(head + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth)
    with pytest.raises(ModelError, match="arrays of arrays of arrays"):
        gguf_format.config(ModelFiles("deep", tmp_path / "deep.gguf"))
