"""What a reader meets in one decode step: the types and files of dovetail whose code runs, or whose objects are handed
to code that runs.

    python benchmarks/step_types.py                     the default model, plain
    python benchmarks/step_types.py --speculative ngram
    python benchmarks/step_types.py --list              with their names

One request is decoded far enough that nothing is done for the first time; then one step is traced with
`sys.setprofile`. Generator expressions and comprehensions belong to the function around them.
"""

from __future__ import annotations

import argparse
import sys
from types import FrameType
from typing import Any

from dovetail import LLM, SamplingParams

_WARM_STEPS = 12


class Census:
    """Collects types and files while it is the profile function of this thread."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """One event of `sys.setprofile`."""
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("dovetail."):
            return
        self.files.add(module)
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            self._meet(frame.f_locals.get(name))

    def _meet(self, value: Any) -> None:
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__.startswith("dovetail."):
            self.types.add(f"{kind.__module__}.{kind.__qualname__}")


def traced_step(llm: LLM) -> Census:
    """The census of one decode step, the request being the only one."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    engine.add_request("one", engine.process_input("The quick brown fox jumps over the quick brown fox", params))
    for _ in range(_WARM_STEPS):
        engine.step()
    census = Census()
    sys.setprofile(census)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    engine.abort_request("one")
    return census


def main() -> None:
    """Prints the two counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculative", help="a draft worker's name")
    parser.add_argument("--list", action="store_true", help="print the names too")
    arguments = parser.parse_args()
    keywords: dict[str, Any] = {"executor": {"name": "cpu", "threads": 1}, "cache": {"memory_gib": 0.2}}
    if arguments.speculative:
        keywords["speculative"] = arguments.speculative
    with LLM(**keywords) as llm:
        census = traced_step(llm)
    print(f"{len(census.types)} types, {len(census.files)} files")
    if arguments.list:
        print("\n".join(sorted(census.types)))
        print("\n".join(sorted(census.files)))


if __name__ == "__main__":
    main()
