"""Whether an adapter fits a model: compared with the model's layers, which are built without memory for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.contracts.errors import ModelError
from dovetail.worker.adapters.peft_files import AdapterFiles, StoredLayer

if TYPE_CHECKING:
    from dovetail.nn.adapters import AdapterSpace, LowRank

_OUTPUT_LAYERS = ("lm_head", "embed_out")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "embed_positions", "wpe")
_MERGE = "merge it into the weights with PEFT (merge_and_unload) and serve the merged model"


def check_fit(files: AdapterFiles, space: AdapterSpace) -> None:
    """Raises `ModelError` for an adapter of another model, for layers that take none, and for ranks that no slot
    holds."""
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
    space.check({name: on_meta(layer) for name, layer in files.layers.items()})


def on_meta(layer: StoredLayer) -> LowRank:
    """The shapes of a layer's matrices, without their numbers."""
    import torch

    from dovetail.nn.adapters import LowRank

    a, b = (torch.empty(matrix.shape, device="meta") for matrix in (layer.a, layer.b))
    return LowRank(a, b, layer.scale)


def check_numbers(files: AdapterFiles, space: AdapterSpace) -> None:
    """Reads the matrices. Raises `ModelError` for one that holds NaN or infinity, or would in a slot."""
    from dovetail.worker.adapters.slots import as_tensor

    for name, layer, a, b in files.data():
        for what, matrix, factor in (
            ("lora_A", as_tensor(a, layer.a), 1.0),
            ("lora_B", as_tensor(b, layer.b), layer.scale),
        ):
            if not matrix.isfinite().all():
                raise ModelError(
                    f"{what} of {name} holds NaN or infinity: the training diverged, or the file is damaged. Take an"
                    " earlier checkpoint of the adapter"
                )
            if not (matrix.float() * factor).to(space.dtype).isfinite().all():
                dtype = str(space.dtype).removeprefix("torch.")
                raise ModelError(
                    f"{what} of {name}{' times its scale' if factor != 1 else ''} has numbers beyond {dtype}, the dtype"
                    " of the slots: load the model with a dtype of a larger range, such as bfloat16"
                )
