"""vLLM's names for speculation: flags, and the keys of `speculative_config`. As `dovetail.vllm.settings`, this is data
about another project's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.config.foreign_names import ForeignName, refused, works

_ONE_RANK = ("draft models run on one rank, whatever the target's", "leave it out")
_DRAFT_LENGTH = (
    "a draft model drafts as far as its own positions and the target's go",
    "lower max_model_len, or leave it out",
)
_ONE_PASS = ("drafts are always verified in one pass", "leave it out")
_ONE_DRAFTER = "speculative.drafters.draft"
_NO_REMOTE_CODE = "no code of a model repository is ever run"

SPECULATION = (
    works(
        "speculative_model",
        "str",
        f"{_ONE_DRAFTER}.path",
        "a draft model; `[ngram]` looks n-grams up without one. `--speculative NAME` takes any draft worker",
        along={f"{_ONE_DRAFTER}.name": "draft_model"},
        meanings={"[ngram]": {f"{_ONE_DRAFTER}.name": "ngram"}},
    ),
    works("speculative_model_quantization", "str", f"{_ONE_DRAFTER}.quantization", "an option of `draft_model`"),
    works("num_speculative_tokens", "int", f"{_ONE_DRAFTER}.num_tokens"),
    refused("speculative_disable_mqa_scorer", "switch", *_ONE_PASS, False),
    refused("speculative_draft_tensor_parallel_size", "int", *_ONE_RANK, 1),
    refused("speculative_max_model_len", "int", *_DRAFT_LENGTH),
    works(
        "speculative_disable_by_batch_size",
        "int",
        "speculative.disable_by_batch_size",
        "counts the requests of a step; by default drafting turns itself down where it does not pay",
    ),
    works("ngram_prompt_lookup_max", "int", f"{_ONE_DRAFTER}.max_match", "an option of the n-gram drafter"),
    works("ngram_prompt_lookup_min", "int", f"{_ONE_DRAFTER}.min_match", "an option of the n-gram drafter"),
    works(
        "spec_decoding_acceptance_method",
        "str",
        "speculative.acceptance.name",
        "any installed acceptance rule",
        values={"rejection_sampler": "rejection", "typical_acceptance_sampler": "typical"},
    ),
    works(
        "typical_acceptance_sampler_posterior_threshold",
        "float",
        "speculative.acceptance.epsilon",
        "an option of the rule `typical`",
    ),
    works(
        "typical_acceptance_sampler_posterior_alpha",
        "float",
        "speculative.acceptance.delta",
        "an option of the rule `typical`",
    ),
    works(
        "disable_logprobs_during_spec_decoding",
        "switch",
        "speculative.disable_logprobs",
        "requests that ask for them all the same are refused, not answered without",
    ),
)

_NO_SUCH_HEADS = "no draft worker reads such heads; `dovetail plugins list` has those that there are"

_SPECULATIVE_PARTS: Mapping[str, ForeignName] = {
    part.name: part
    for part in (
        works(
            "method",
            "str",
            f"{_ONE_DRAFTER}.name",
            values={"eagle3": "eagle", "[ngram]": "ngram"},
            refuses=dict.fromkeys(
                ("mlp_speculator", "mtp", "deepseek_mtp", "ernie_mtp", "qwen3_next_mtp"), _NO_SUCH_HEADS
            ),
        ),
        works(
            "model",
            "str",
            f"{_ONE_DRAFTER}.path",
            refuses=dict.fromkeys(
                ("ngram", "[ngram]"), "n-grams are looked up without a model: give method='ngram' alone"
            ),
        ),
        works("num_speculative_tokens", "int", f"{_ONE_DRAFTER}.num_tokens"),
        works("prompt_lookup_max", "int", f"{_ONE_DRAFTER}.max_match"),
        works("prompt_lookup_min", "int", f"{_ONE_DRAFTER}.min_match"),
        works("quantization", "str", f"{_ONE_DRAFTER}.quantization"),
        works("revision", "str", f"{_ONE_DRAFTER}.revision"),
        works("disable_by_batch_size", "int", "speculative.disable_by_batch_size"),
        works("disable_logprobs", "switch", "speculative.disable_logprobs"),
        works(
            "acceptance_method",
            "str",
            "speculative.acceptance.name",
            values={"rejection_sampler": "rejection", "typical_acceptance_sampler": "typical"},
        ),
        works(
            "rejection_sample_method",
            "str",
            "speculative.acceptance.name",
            values={"standard": "rejection", "probabilistic": "rejection", "strict": "rejection"},
        ),
        works("synthetic_acceptance_rates", "json", "speculative.acceptance.rates"),
        works("synthetic_acceptance_length", "float", "speculative.acceptance.length"),
        works("posterior_threshold", "float", "speculative.acceptance.epsilon"),
        works("posterior_alpha", "float", "speculative.acceptance.delta"),
        works("suffix_decoding_max_spec_factor", "float", f"{_ONE_DRAFTER}.max_spec_factor"),
        works("suffix_decoding_min_token_prob", "float", f"{_ONE_DRAFTER}.min_token_prob"),
        refused("draft_tensor_parallel_size", "int", *_ONE_RANK, 1),
        refused("max_model_len", "int", *_DRAFT_LENGTH),
        refused("disable_mqa_scorer", "switch", *_ONE_PASS, False),
        refused("disable_padded_drafter_batch", "switch", "no batch is padded", "leave it out", True, False),
        refused("code_revision", "str", _NO_REMOTE_CODE, "leave it out"),
        refused("enforce_eager", "switch", "target and drafter run alike", "set executor.enforce_eager", False),
        refused(
            "speculative_token_tree",
            "str",
            "a drafter's own options give its tree",
            "set tree of medusa, or top_k and depth of eagle",
        ),
    )
}
"""Keys of `speculative_config`."""

SPECULATIVE_CONFIG = ForeignName(
    "speculative_config",
    "json",
    "works",
    note="sets one drafter of the section `speculative`, which can hold several; its keys are those of the flags "
    "about speculation, and `method`",
    parts=_SPECULATIVE_PARTS,
    implied={
        "model": ("method", "draft_model"),
        "prompt_lookup_max": ("method", "ngram"),
        "prompt_lookup_min": ("method", "ngram"),
    },
)
