"""From a prompt and its parameters to a validated request: tokenized once, every option checked against the model and
the chosen components. Whatever cannot be served is refused here, before it costs anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, cast

from dovetail.config.tree import nearest
from dovetail.contracts.engine_client import EngineFacts
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.sampling import SamplingParams, as_token_ids
from dovetail.engine.output_grammars import OutputGrammars
from dovetail.engine.pooling.params import NEUTRAL, settled
from dovetail.engine.pooling.scores import check_not_empty, pair_prompt
from dovetail.engine.request_fields import check_salt
from dovetail.engine.tokenization.cutting import encode_start
from dovetail.engine.tokenization.tokenizer import Tokenizer


def as_prompts(given: object) -> list[Prompt]:
    """One prompt or many: a list of integers, or a flat array, is one prompt of token ids. Raises `RequestError` for
    what is neither."""
    if isinstance(given, str | Mapping):
        return [cast("Prompt", given)]
    if isinstance(given, list | tuple):
        return [cast("Prompt", given)] if _is_flat(given) else list(given)
    if isinstance(given, bytes | bytearray | memoryview | Set) or not isinstance(given, Iterable):
        raise RequestError(f"prompts are text, token ids, mappings, or a list of those, got {given!r}")
    items = list(given)  # an array, a tensor, a range, a generator
    return [cast("Prompt", items)] if _is_flat(items) else items


def _is_flat(items: Sequence[object]) -> bool:
    """Whether these are numbers (of torch too, whose scalars are tensors) and no prompts."""
    return bool(items) and all(isinstance(item, Integral) or _is_scalar(item) for item in items)


def _is_scalar(item: object) -> bool:
    if isinstance(item, str | bytes | Mapping | list | tuple):
        return False
    import numpy as np  # for what is none of the usual prompts

    return np.ndim(cast("Any", item)) == 0


def drafting_refusal(facts: EngineFacts, params: SamplingParams) -> str | None:
    """Why no drafter may guess for a request with these parameters; None: any may."""
    rule = facts.rules.get(params.acceptance or "")
    if not (facts.accepts_sampling if rule is None else rule.sampling) and not params.is_greedy:
        name, another = (
            (facts.acceptance, "speculative.acceptance") if rule is None else (params.acceptance, "acceptance")
        )
        return (
            f"acceptance rule {name!r} serves temperature 0 only: set temperature=0, speculation='off', or another"
            f" {another}"
        )
    ranks = params.best_of is not None and params.best_of > params.n
    if facts.drafts_without_logprobs and (params.logprobs is not None or ranks):
        what = "logprobs were asked for" if params.logprobs is not None else "best_of ranks by log probabilities"
        return (
            f"{what}, and speculative.disable_logprobs leaves them out: set speculation='off', or"
            " speculative.disable_logprobs to false"
        )
    return None


@dataclass(frozen=True)
class ProcessedInput:
    """A request that can be served."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and output together end here."""
    eos_token_ids: tuple[int, ...]
    """Empty where the request ignores them."""
    stop_ids: frozenset[int]
    """Tokens that end the output: end-of-sequence and the request's own."""
    bad_word_ids: tuple[tuple[int, ...], ...]
    drafter: str | None
    cache_salt: str | None
    shows_logprobs: bool
    """Whether outputs carry log probabilities; they may be computed for ranking alone."""
    grammar: OutputGrammar | None
    lora_request: LoRARequest | None = None
    """The adapter that is added to the weights."""
    prediction: tuple[int, ...] = ()
    """Token ids of what the output is expected to be; empty where the request says nothing."""
    token_types: tuple[int, ...] = ()
    """The type of each token; empty: all are 0."""
    pooling: PoolingParams | None = None
    """With its task settled: the request ends when its prompt is computed, and `params` are `NEUTRAL`. None: it
    generates."""
    needs_every_state: bool = False
    """Its pooler reads every state of the prompt: no cached prefix may stand for some of them."""

    @property
    def streams(self) -> bool:
        """Whether there are outputs before the last. Of `best_of` completions none can be shown before all are done."""
        return self.params.output_kind != "final_only" and self.params.num_sequences == self.params.n

    @property
    def streams_tokens(self) -> bool:
        """Whether tokens are wanted after every step: to show them, or to look for stop strings."""
        return self.streams or bool(self.params.stop)


class InputProcessor:
    """Validates and tokenizes requests for one engine."""

    def __init__(self, facts: EngineFacts, tokenizer: Tokenizer | None):
        self._facts = facts
        self._tokenizer = tokenizer
        self._grammars = OutputGrammars(facts, tokenizer)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation config recommends."""
        return SamplingParams(**self._facts.default_sampling)

    def process(self, prompt: Prompt, params: SamplingParams | PoolingParams | None) -> ProcessedInput:
        """`params`: None takes the default ones for sampling. Raises `RequestError` for whatever cannot be served,
        saying what to change."""
        if isinstance(params, PoolingParams):
            return self._process_pooling(prompt, settled(params, self._facts.pooling))
        if self._facts.why_not_generate:
            raise RequestError(self._facts.why_not_generate)
        params = params.snapshot() if params is not None else self.default_sampling_params()
        text, token_ids, cache_salt = self._read(prompt, params.truncate_prompt_tokens, num_output=1)
        if self._token_types(prompt, token_ids, params.truncate_prompt_tokens):
            raise RequestError("token_type_ids are for requests that are pooled, not for generate: leave them out")
        shows_logprobs = params.logprobs is not None
        self._check_params(params)
        drafter = self._drafter(params)
        if params.acceptance is not None and params.acceptance not in self._facts.rules:
            params = replace(params, acceptance=None)  # the default rule's own name
        self._check_min_tokens(params.min_tokens, len(token_ids))
        if params.best_of is not None and params.best_of > params.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # ranking needs the cumulative log probability
        if params.logprobs is not None and params.logprobs_mode is None:
            params = replace(params, logprobs_mode=self._facts.logprobs_mode)
        limit = self._facts.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + params.max_tokens)
        eos = () if params.ignore_eos else self._facts.eos_token_ids
        return ProcessedInput(
            prompt=text,
            token_ids=token_ids,
            params=params,
            max_total_tokens=limit,
            eos_token_ids=eos,
            stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
            bad_word_ids=self._bad_word_ids(params),
            drafter=drafter,
            cache_salt=cache_salt,
            shows_logprobs=shows_logprobs,
            grammar=self._grammars.grammar_of(params.structured_outputs, token_ids),
            prediction=self._prediction(params.prediction, drafter),
        )

    def pair(self, first: Prompt, second: Prompt, most: int | None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        has_types = self._facts.num_token_types > 0
        return pair_prompt(self._tokenizer, first, second, has_types=has_types, most=most)

    def _process_pooling(self, prompt: Prompt, params: PoolingParams) -> ProcessedInput:
        check_not_empty(prompt)
        text, token_ids, cache_salt = self._read(prompt, params.truncate_prompt_tokens, num_output=0)
        return ProcessedInput(
            prompt=text,
            token_ids=token_ids,
            params=NEUTRAL,
            max_total_tokens=len(token_ids),
            eos_token_ids=(),
            stop_ids=frozenset(),
            bad_word_ids=(),
            drafter=None,
            cache_salt=cache_salt,
            shows_logprobs=False,
            grammar=None,
            pooling=params,
            needs_every_state=params.task not in self._facts.pooling.skips_prefix,
            token_types=self._token_types(prompt, token_ids, params.truncate_prompt_tokens),
        )

    def _token_types(self, prompt: Prompt, token_ids: Sequence[int], keep: int | None) -> tuple[int, ...]:
        """The type of each of the tokens that are kept of a prompt; empty where it gives none."""
        given: Any = prompt.get("token_type_ids") if isinstance(prompt, Mapping) else None
        if given is None:
            return ()
        count = self._facts.num_token_types
        if not count:
            raise RequestError("token_type_ids were given, and the tokens of this model have no types: leave them out")
        types = as_token_ids("token_type_ids", given)
        types = types[:keep]
        if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None:
            raise RequestError("token_type_ids belong to prompt_token_ids, and the prompt is text: give both")
        if len(types) != len(token_ids) or not all(0 <= one < count for one in types):
            raise RequestError(
                f"token_type_ids must be one number of 0 to {count - 1} for each of the {len(token_ids)} tokens, got"
                f" {list(types)[:8]}"
            )
        return tuple(types)

    def _read(self, prompt: Prompt, keep: int | None, num_output: int) -> tuple[str | None, list[int], str | None]:
        """Text, token ids and cache salt of a prompt behind which `num_output` tokens must have room. `keep`: only so
        many tokens, at its end where output follows, else at its beginning; None: all."""
        if keep is None:
            self._check_text(prompt, num_output)
        text, token_ids = self._tokens(prompt, keep if num_output == 0 else None)
        cache_salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        check_salt(cache_salt)
        if keep is not None:
            token_ids = token_ids[-keep:] if num_output else token_ids[:keep]
        self._check_prompt(token_ids, num_output)
        return text, token_ids, cache_salt

    def _tokens(self, prompt: Prompt, most: int | None) -> tuple[str | None, list[int]]:
        """Text and token ids. `most`: of a text, with special tokens around it; see `encode_start`."""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "token_type_ids"}
            if unknown:
                raise RequestError(
                    f"unknown prompt key {sorted(map(str, unknown))[0]!r}; give 'prompt' (text) or 'prompt_token_ids',"
                    " and 'cache_salt' if need be"
                )
            ids: Any = prompt.get("prompt_token_ids")
            text: Any = prompt.get("prompt")
            if ids is not None:
                if text is not None and not isinstance(text, str):
                    raise RequestError(f"prompt, beside prompt_token_ids, must be text, got {text!r}")
                return text, list(as_token_ids("prompt_token_ids", ids))
            prompt = text
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("this engine has no tokenizer (tokenizer_mode none): pass prompt_token_ids")
            return prompt, _encoded(self._tokenizer, prompt, most)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Set):
            raise RequestError(f"a prompt is text, a list of token ids or a mapping, got {type(prompt).__name__}")
        return None, list(as_token_ids("prompt_token_ids", prompt))

    def _check_text(self, prompt: Prompt, num_output: int) -> None:
        """Refuses a text that is so long that its tokens need not be counted: it would take seconds."""
        if isinstance(prompt, Mapping):
            text: Any = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
        else:
            text = prompt
        if not isinstance(text, str) or self._tokenizer is None:
            return
        longest = self._facts.max_model_len - num_output
        if len(text.encode("utf-8", "surrogatepass")) <= longest:  # as nearly all are
            return
        fewest = self._tokenizer.fewest_tokens(text)
        if fewest > longest:
            raise self._too_long(f"{fewest} tokens or more", num_output)

    def _too_long(self, size: str, num_output: int) -> RequestError:
        longest = self._facts.max_model_len - num_output
        needed = " and one is needed for the output" if num_output else ""
        return RequestError(
            f"the prompt has {size}, but max_model_len is {self._facts.max_model_len}{needed}:"
            f" shorten it to {longest} tokens, set truncate_prompt_tokens, or raise model.max_model_len"
        )

    def _check_prompt(self, token_ids: list[int], num_output: int) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(token_ids) > self._facts.max_model_len - num_output:
            raise self._too_long(f"{len(token_ids)} tokens", num_output)
        self.check_ids("prompt_token_ids", token_ids)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Of the model."""
        return self._facts.eos_token_ids

    def check_ids(self, what: str, ids: Sequence[int]) -> None:
        """Raises `RequestError` where one of `ids` is no token id; `what` names them in the message."""
        if not ids or (min(ids) >= 0 and max(ids) < self._facts.vocab_size):
            return
        for token in ids:
            if not 0 <= token < self._facts.vocab_size:
                raise RequestError(
                    f"{what} holds {token!r}, which is no token id: they are integers of 0 to"
                    f" {self._facts.vocab_size - 1}"
                )

    def _check_params(self, params: SamplingParams) -> None:
        if params.num_sequences > self._facts.max_completions:
            raise RequestError(
                f"{params.num_sequences} completions of one prompt were asked for (n, best_of), and"
                f" model.max_completions allows {self._facts.max_completions}: ask for fewer, or raise it"
            )
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("kept_special_tokens", params.kept_special_tokens)
        self.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self.check_ids("logit_bias", list(params.logit_bias or ()))
        for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if value is None:
                continue
            if value > self._facts.vocab_size:
                raise RequestError(
                    f"{name} is {value}, but the vocabulary has {self._facts.vocab_size} tokens: ask for fewer, or -1"
                    " for all"
                )
            asked = self._facts.vocab_size if value == -1 else value
            limit = self._facts.max_logprobs
            if 0 <= limit < asked:
                raise RequestError(
                    f"{name} is {value}, but model.max_logprobs allows {limit}: ask for fewer, or raise it (-1: all)"
                )
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids")
        for name in params.processors:
            if name not in self._facts.processors:
                known = ", ".join(sorted(self._facts.processors)) or "none"
                raise RequestError(f"no logits processor {name!r} is configured (configured: {known})")

    def _check_min_tokens(self, min_tokens: int, num_prompt_tokens: int) -> None:
        room = self._facts.max_model_len - num_prompt_tokens
        if min_tokens > room:
            raise RequestError(
                f"min_tokens is {min_tokens}, but max_model_len is {self._facts.max_model_len} and the prompt has"
                f" {num_prompt_tokens} tokens: ask for at most {room}, shorten the prompt, or raise"
                " model.max_model_len"
            )

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a word and inside one."""
        if not params.bad_words:
            return ()
        if self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this engine has none: use logit_bias")
        spellings: list[tuple[int, ...]] = []
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids and ids not in spellings:
                    spellings.append(ids)
        return tuple(spellings)

    def _drafter(self, params: SamplingParams) -> str | None:
        facts, asked = self._facts, params.speculation
        if facts.acceptance is None:
            if params.acceptance is not None:
                raise RequestError(
                    f"acceptance {params.acceptance!r} was asked for, but the config has no speculative section"
                )
            if asked not in (None, "off"):
                raise RequestError(f"speculation {asked!r} was asked for, but the config has no speculative section")
            return None
        name = facts.default_drafter if asked is None else (None if asked == "off" else asked)
        self._check_acceptance(params.acceptance, name)
        if name is None:
            return None
        if name not in facts.drafters:
            known = ", ".join(sorted(facts.drafters))
            raise RequestError(f"no drafter {name!r} is configured (configured: {known}, or off)")
        refusal = drafting_refusal(facts, params)
        if refusal is not None:
            raise RequestError(refusal)
        return name

    def _check_acceptance(self, asked: str | None, drafter: str | None) -> None:
        """Refuses an acceptance rule that is not there, and one that cannot judge what the request's drafter drafts."""
        facts = self._facts
        if asked is None:
            return
        if drafter is None:
            raise RequestError(
                f"acceptance {asked!r} was asked for, and no drafter guesses for the request: leave it out, or name a"
                " drafter (speculation)"
            )
        if asked not in facts.rules:
            if asked == facts.acceptance:
                return
            known = nearest(asked, [*facts.rules, str(facts.acceptance)])
            raise RequestError(
                f"acceptance {asked!r} is no acceptance rule that requests may name; {known}."
                f" Such rules are in speculative.rules; left out, {facts.acceptance!r} judges"
            )
        if drafter in facts.tree_drafters and not facts.rules[asked].trees:
            raise RequestError(
                f"acceptance rule {asked!r} judges chains only, and the drafter {drafter!r} proposes trees: name"
                " another of the two"
            )

    def _prediction(self, given: str | Sequence[int] | None, drafter: str | None) -> tuple[int, ...]:
        """Token ids of a prediction. Raises `RequestError` where nobody would read it, and for one longer than any
        output."""
        if given is None:
            return ()
        if drafter not in self._facts.prediction_drafters:
            whose = "no drafter guesses for the request" if drafter is None else f"drafter {drafter!r} does not read it"
            known = ", ".join(sorted(self._facts.prediction_drafters))
            remedy = (
                f"name one that does (speculation: {known})"
                if known
                else "configure one that does, as in speculative.drafters.predicted={name: prediction}"
            )
            raise RequestError(f"a prediction was given, and {whose}: {remedy}, or leave the prediction out")
        if isinstance(given, str):
            if self._tokenizer is None:
                raise RequestError("a prediction as text needs a tokenizer, and this engine has none: give token ids")
            self._check_prediction(self._tokenizer.fewest_tokens(given))
            given = self._tokenizer.encode(given, add_special_tokens=False)
        self._check_prediction(len(given))
        self.check_ids("prediction", given)
        return tuple(given)

    def _check_prediction(self, num_tokens: int) -> None:
        if num_tokens > self._facts.max_model_len:
            raise RequestError(
                f"the prediction has {num_tokens} tokens or more, and max_model_len is {self._facts.max_model_len}:"
                " shorten it"
            )


def _encoded(tokenizer: Tokenizer, text: str, most: int | None) -> list[int]:
    return tokenizer.encode(text) if most is None else encode_start(tokenizer, text, most)
