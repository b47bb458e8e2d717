"""Whether an adapter fits a model: compared with the model's layers, which are built without memory for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.contracts.errors import ModelError
from dovetail.worker.adapters.peft_files import AdapterFiles

if TYPE_CHECKING:
    from dovetail.nn.adapters import AdapterSpace

_OUTPUT_LAYERS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embed_positions", "wpe")
_MERGE = "merge it into the weights with PEFT (merge_and_unload) and serve the merged model"


def check_fit(files: AdapterFiles, space: AdapterSpace) -> None:
    """Raises `ModelError` for an adapter of another model, for layers that take none, and for ranks that no slot
    holds."""
    import torch

    from dovetail.nn.adapters import LowRank

    for name in files.layers:
        last = name.rpartition(".")[2]
        what = (
            "the output layer"
            if last in _OUTPUT_LAYERS
            else "embeddings"
            if last in _EMBEDDINGS
            else "experts of a mixture"
            if ".experts." in name
            else None
        )
        if what is not None:
            raise ModelError(f"it changes {what} ({name}), which take no adapters: {_MERGE}")
    space.check(
        {
            name: LowRank(
                torch.empty(layer.a.shape, device="meta"), torch.empty(layer.b.shape, device="meta"), layer.scale
            )
            for name, layer in files.layers.items()
        }
    )
