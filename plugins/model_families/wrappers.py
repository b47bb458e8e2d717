"""Models for images and text whose text model is one that is served: its config, and the names of its tensors."""

from __future__ import annotations

from dovetail.contracts.errors import ModelError
from dovetail.nn.hf_config import Config, required

_TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architecture of a text model of each type, when it is a model of its own."""

TEXT_NAMES = ((r"^language_model\.(model|lm_head)\.", r"\1."), (r"^model\.language_model\.", "model."))
"""From the names that text models have within wrappers, of transformers 4 and 5, to those that they have alone."""


def text_model(config: Config) -> Config:
    """The config of the text model alone, with all keys that its type leaves at their defaults; a config that wraps
    nothing is returned as it is. Raises `ModelError` for a text model that is not served."""
    text = config.get("text_config")
    architecture = str(required(config, "architectures")[0])
    if not architecture.endswith("ForConditionalGeneration") or not text:
        return config
    from transformers import CONFIG_MAPPING

    model_type = required(text, "model_type")
    if model_type not in _TEXT_MODELS:
        raise ModelError(
            f"the text model within {architecture} is of type {model_type!r}, and only {', '.join(_TEXT_MODELS)} are "
            "served there"
        )
    try:
        whole = CONFIG_MAPPING[model_type].from_dict(dict(text)).to_dict()
    except Exception as error:
        raise ModelError(f"transformers cannot use text_config: {type(error).__name__}: {error}") from error
    is_tied = bool(config.get("tie_word_embeddings", whole["tie_word_embeddings"]))
    if architecture == "LlavaForConditionalGeneration":
        # Its own key says false by default, also where the text model was saved tied.
        is_tied = is_tied or bool(whole["tie_word_embeddings"])
    return {**whole, "architectures": [_TEXT_MODELS[model_type]], "tie_word_embeddings": is_tied}
