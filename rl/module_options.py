"""How a `RolloutModule` samples, and how long its sequences are, with the names of ChatLearn's `model_args`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.sampling import SamplingParams
from dovetail.rl.rollout_batch import RolloutOptions


@dataclass(frozen=True, kw_only=True)
class ModuleOptions:
    """Options of a module. `eval_forward` takes those that begin with `eval_`, `forward_step` the ones without.

    Raises `ConfigError`, naming the option, for a value that no request may have.
    """

    seq_length: int
    """Tokens of a prompt and its completion together, at most; the width of the tensors that come back."""
    max_new_tokens: int
    """What a prompt must leave: it has at most `seq_length - max_new_tokens` tokens."""
    new_token_limit: bool = True
    """Whether a completion has at most `max_new_tokens` tokens; else it may go on to `seq_length`."""
    num_inference_per_prompt: int = 1
    """How often each prompt is in a training dataset, one after the other."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    eval_temperature: float = 1.0
    eval_top_p: float = 1.0
    eval_top_k: int = -1
    eval_min_p: float = 0.0
    eval_presence_penalty: float = 0.0
    eval_frequency_penalty: float = 0.0
    eval_repetition_penalty: float = 1.0
    stop_token_list: str | tuple[str, ...] = ()
    """Stop strings, also as one text with ";" between them. Completions end with them, and contain them."""
    stop_token_ids: tuple[int, ...] = ()
    """With the model's own end tokens."""
    ignore_eos: bool = False
    """Whether completions go on behind the model's end tokens."""
    skip_special_tokens: bool = True
    """Whether `str_outputs` leave special tokens out."""
    pad_token_id: int = 0
    """What `all_tokens` has behind the end of a sequence."""
    logprobs_mode: str | None = None
    """`SamplingParams.logprobs_mode`; None: the engine's."""
    prompt_key: str = "prompt"
    """Where data has the texts of prompts."""
    input_ids_key: str = "input_ids"
    """Where data has their token ids."""

    def __post_init__(self) -> None:
        for name in ("seq_length", "max_new_tokens", "num_inference_per_prompt"):
            value = vars(self)[name]
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is {value!r}; give an integer of at least 1")
        if self.max_prompt_length < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens} and seq_length {self.seq_length}, which leaves nothing for"
                " prompts: give a seq_length that is greater"
            )
        for is_eval in (False, True):
            try:
                self.sampling_params(1, is_eval=is_eval, with_text=True)
            except RequestError as error:
                raise ConfigError(f"{'eval_*' if is_eval else 'training'} sampling: {error}") from error

    @property
    def max_prompt_length(self) -> int:
        """In tokens."""
        return self.seq_length - self.max_new_tokens

    def max_tokens(self, prompt_length: int) -> int:
        """Of the completion of a prompt with so many tokens."""
        return self.max_new_tokens if self.new_token_limit else self.seq_length - prompt_length

    def sampling_params(self, max_tokens: int, *, is_eval: bool, with_text: bool) -> SamplingParams:
        """Of a request whose completion may have `max_tokens`. `with_text`: the engine has a tokenizer."""
        params = self._rollout_options(is_eval).sampling_params(max_tokens, (), greedy=False, with_text=with_text)
        return replace(
            params,
            min_p=self.eval_min_p if is_eval else self.min_p,
            presence_penalty=self.eval_presence_penalty if is_eval else self.presence_penalty,
            frequency_penalty=self.eval_frequency_penalty if is_eval else self.frequency_penalty,
            repetition_penalty=self.eval_repetition_penalty if is_eval else self.repetition_penalty,
            skip_special_tokens=self.skip_special_tokens,
        )

    def _rollout_options(self, is_eval: bool) -> RolloutOptions:
        stops = self.stop_token_list
        return RolloutOptions(
            max_new_tokens=self.max_new_tokens,
            temperature=self.eval_temperature if is_eval else self.temperature,
            top_p=self.eval_top_p if is_eval else self.top_p,
            top_k=self.eval_top_k if is_eval else self.top_k,
            stop_token_ids=self.stop_token_ids,
            stop_strings=tuple(filter(None, stops.split(";"))) if isinstance(stops, str) else tuple(stops),
            ignore_eos=self.ignore_eos,
            pad_token_id=self.pad_token_id,
            logprobs_mode=self.logprobs_mode,
        )
