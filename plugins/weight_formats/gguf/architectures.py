"""What llama.cpp's converter did to each architecture's checkpoint, described so that it can be undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_GEMMA = {
    **_ATTENTION,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **_MLP,
}
_QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    """One architecture on both sides: Hugging Face's names, and what the converter changed."""

    hf_class: str
    model_type: str
    layers: Mapping[str, str]
    """Part of a layer, GGUF name -> Hugging Face name; weights and biases alike."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Tensors that stack all experts, split again into one tensor per expert."""
    permuted_rotary: bool = False
    """Rows of q and k were reordered within each head from halves to interleaved pairs."""
    norm_offset: float = 0.0
    """Added to every norm weight by the converter."""


LLAMA = Architecture("LlamaForCausalLM", "llama", _DENSE, permuted_rotary=True)
MISTRAL = Architecture("MistralForCausalLM", "mistral", _DENSE, permuted_rotary=True)
MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    {**_DENSE, "ffn_gate_inp": "block_sparse_moe.gate"},
    _MIXTRAL_EXPERTS,
    permuted_rotary=True,
)
QWEN2 = Architecture("Qwen2ForCausalLM", "qwen2", _DENSE)
QWEN3 = Architecture("Qwen3ForCausalLM", "qwen3", {**_DENSE, **_QK_NORM})
QWEN2_MOE = Architecture(
    "Qwen2MoeForCausalLM", "qwen2_moe", {**_DENSE, "ffn_gate_inp": "mlp.gate", **_SHARED_EXPERT}, _QWEN_EXPERTS
)
QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM", "qwen3_moe", {**_DENSE, **_QK_NORM, "ffn_gate_inp": "mlp.gate"}, _QWEN_EXPERTS
)
GEMMA2 = Architecture("Gemma2ForCausalLM", "gemma2", _GEMMA, norm_offset=1.0)
GEMMA3 = Architecture("Gemma3ForCausalLM", "gemma3_text", {**_GEMMA, **_QK_NORM}, norm_offset=1.0)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2moe": QWEN2_MOE,
    "qwen3moe": QWEN3_MOE,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
}
"""By `general.architecture`. "llama" is the value of Mistral and Mixtral too, see `config.architecture_of`."""
