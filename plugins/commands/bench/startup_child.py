"""The fresh process of `bench startup`: makes an engine, generates one token, and says when."""

from __future__ import annotations

import json
import sys
import time

from dovetail.contracts.errors import ConfigError, DovetailError, RequestError

_PROMPT = "The tide tables were printed in a thin grey book that the harbour office gave away every January."


def main() -> None:
    """Prints a line with the first token, then one with the times of the phases."""
    begin = time.monotonic()
    from dovetail import LLM, SamplingParams

    imported = time.monotonic()
    import torch  # noqa: F401 - the engine would import it, and it takes longer than all else

    has_torch = time.monotonic()
    with LLM(**json.loads(sys.argv[1])) as llm:
        ready = time.monotonic()
        prompt = _PROMPT if llm.get_tokenizer() is not None else [1] * 16
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        print("dovetail-bench: first token", flush=True)
        done = time.monotonic()
        # Only now: it imports what start-up does not need.
        from dovetail.plugins.commands.bench.session import describe_engine, describe_environment

        report = {
            "phases": {
                "import": imported - begin,
                "import torch": has_torch - imported,
                "engine": ready - has_torch,
                "first token": done - ready,
            },
            "prompt_tokens": len(output.prompt_token_ids),
            "environment": describe_environment(llm.engine),
            "config": describe_engine(llm.engine),
        }
    print(f"dovetail-bench: {json.dumps(report, default=str)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except DovetailError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | RequestError) else 1)
