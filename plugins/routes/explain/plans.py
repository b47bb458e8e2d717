"""What the server would do for a request, with the origin of each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dovetail.contracts.engine_client import EngineFacts, RequestPlan
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.routes.explain.bodies import Prepared
from dovetail.plugins.routes.explain.choices import chosen_adapter, may_differ, why_drafter

_ALWAYS_SHOWN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
)
_SHOWN_ELSEWHERE = frozenset(
    {"max_tokens", "speculation", "processors", "structured_outputs", "output_kind", "detokenize", "extra"}
)
_FORM_FIELDS = (
    "response_format",
    "text",
    "output_config",
    "output_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def plan_as_data(prepared: Prepared, plans: Sequence[RequestPlan], facts: EngineFacts) -> dict[str, Any]:
    """The plan of a request as JSON. `plans`: one for each prompt, at least one."""
    asked, adapter = prepared.params.speculation, prepared.model.lora_request
    return {
        "object": "explanation.plan",
        "model": prepared.model.name,
        "weights": facts.model,
        "prompts": [_prompt(plan, prepared, facts) for plan in plans],
        "speculation": {
            "drafter": plans[0].drafter,
            "why": why_drafter(asked, facts) + may_differ(asked, facts),
            "acceptance": facts.acceptance if plans[0].drafter is not None else None,
        },
        "grammar": _grammar(prepared, plans[0], facts),
        "dialect": {
            "name": prepared.dialect,
            "why": "the text is returned as the model writes it"
            if prepared.dialect is None
            else "it reads the answer (config: dialect.name)",
        },
        "sampling": _sampling(prepared, facts),
        "processors": {"asked": dict(prepared.params.processors), "configured": list(facts.processors)},
        "priority": {
            "value": prepared.priority,
            "why": f"the scheduler {facts.scheduler!r} {'reads' if facts.has_priorities else 'does not read'} it",
        },
        "prefix_cache": _prefix_cache(prepared, facts),
        "adapter": chosen_adapter(adapter.name if adapter is not None else "", facts),
    }


def _prompt(plan: RequestPlan, prepared: Prepared, facts: EngineFacts) -> dict[str, Any]:
    origin, why = _max_tokens(plan, prepared, facts)
    return {
        "tokens": plan.num_prompt_tokens,
        "max_tokens": {"value": plan.max_tokens, "origin": origin, "why": why},
    }


def _max_tokens(plan: RequestPlan, prepared: Prepared, facts: EngineFacts) -> tuple[str, str]:
    asked = prepared.params.max_tokens
    if asked is None or plan.max_tokens < asked:
        wanted = "no limit is given" if asked is None else f"{asked} are asked for"
        length = f"model.max_model_len is {facts.max_model_len} and the prompt has {plan.num_prompt_tokens} tokens"
        return "model_length", f"{wanted}, {length}"
    names = prepared.names.get("max_tokens", ("max_tokens",))
    given = next((name for name in names if name in prepared.fields), None)
    if given is not None and prepared.fields[given] == 0:
        return "request", f"{given} is 0: one token is computed with the prompt, and not shown"
    if given is not None:
        return "request", f"the request gives {given}"
    if facts.default_sampling.get("max_tokens") == asked:
        return "generation_config", "max_new_tokens of the model's generation config"
    return "default", "the default of this endpoint"


def _grammar(prepared: Prepared, plan: RequestPlan, facts: EngineFacts) -> dict[str, Any]:
    if plan.grammar_form is None:
        return {"backend": None, "form": None, "source": None, "why": _why_free(prepared)}
    sources = [name for name in _FORM_FIELDS if _asks_for_form(name, prepared.fields.get(name))]
    choice = prepared.tools.choice.mode
    if prepared.tools.tools and choice != "none":
        sources.append("tools")
    source = " and ".join(sources)
    verb = "ask" if len(sources) > 1 or source == "tools" else "asks"
    suffix = f" (tool_choice: {choice})" if "tools" in sources else ""
    return {
        "backend": facts.grammar.name,
        "form": plan.grammar_form,
        "source": source,
        "why": f"{source} {verb} for a form of the output{suffix}",
    }


def _why_free(prepared: Prepared) -> str:
    if not prepared.tools.tools or prepared.tools.choice.mode == "none":
        return "nothing in the request asks for a form of the output"
    return (
        f"tool_choice is {prepared.tools.choice.mode}, and the dialect {prepared.dialect} leaves the model free to"
        " answer or to call a tool: strict tools, or tool_choice required, would bind it"
    )


def _asks_for_form(name: str, value: Any) -> bool:
    if name in ("text", "output_config"):
        value = (value or {}).get("format")
    return value is not None and not (isinstance(value, Mapping) and value.get("type") == "text")


def _sampling(prepared: Prepared, facts: EngineFacts) -> dict[str, Any]:
    values, plain = asdict(prepared.params), asdict(SamplingParams())
    return {
        name: {"value": value, "origin": _origin(name, prepared, facts)}
        for name, value in values.items()
        if name in _ALWAYS_SHOWN or (value != plain[name] and name not in _SHOWN_ELSEWHERE)
    }


def _origin(name: str, prepared: Prepared, facts: EngineFacts) -> str:
    """Of one sampling parameter: request, dialect, generation_config or default."""
    is_given = any(each in prepared.fields for each in prepared.names.get(name, (name,)))
    if vars(prepared.params)[name] != vars(prepared.asked)[name]:
        return "request and dialect" if is_given else "dialect"
    if is_given:
        return "request"
    return "generation_config" if name in facts.default_sampling else "default"


def _prefix_cache(prepared: Prepared, facts: EngineFacts) -> dict[str, Any]:
    if not facts.prefix_caching:
        return {"is_read": False, "why": "cache.prefix_caching is off"}
    if prepared.params.prompt_logprobs is not None:
        return {"is_read": False, "why": "log probabilities of the prompt need all of it computed"}
    whose = "requests with the same cache_salt" if prepared.is_salted else "requests without a cache_salt"
    return {"is_read": True, "why": f"whole blocks of {facts.block_size} tokens that {whose} had before"}
