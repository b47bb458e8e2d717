"""Draft vocabularies: heads guess only a target's frequent tokens.

Reading the whole unembedding is most of what a small head costs, and nearly all text consists of a few thousand tokens
(FR-Spec, Zhao et al. 2025, arXiv 2502.14856). A folder of heads may hold `draft_vocabulary.safetensors` with the int32
tensor `token_ids`: the tokens that its heads guess. Other tokens are never guessed, which costs speed and no quality.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dovetail.contracts.errors import ModelError
from dovetail.contracts.quantization import LinearShape
from dovetail.contracts.speculation import LayerSetup

FILE = "draft_vocabulary.safetensors"
_ROWS_AT_ONCE = 64


class DraftVocabulary:
    """A subset of the target's tokens, with the target's unembedding of them."""

    def __init__(self, token_ids: Tensor, setup: LayerSetup):
        self.token_ids = token_ids.to(setup.device, torch.int64)
        """int64 [v]: the target's ids."""
        shape = LinearShape("draft_vocabulary", setup.hidden_size, len(token_ids), has_bias=False)
        self._kernel = setup.create_context().create_kernel(shape)
        self.read_target(setup)

    def read_target(self, setup: LayerSetup) -> None:
        """Takes the target's unembedding, in place of an earlier one."""
        self._kernel.load(slice(0, len(self.token_ids)), _unembedding(self.token_ids, setup))
        self._kernel.finish()

    def tensors(self) -> Iterable[Tensor]:
        """The ids and the unembedding, but for layouts of oneDNN's own."""
        yield self.token_ids
        yield from self._kernel.tensors()

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits [N, v] of states [N, hidden_size] that are ready for the target's unembedding."""
        return self._kernel.apply(states, None)


def has_draft_vocabulary(folder: Path) -> bool:
    """Whether a folder of heads names the tokens that they guess."""
    return (folder / FILE).exists()


def load_draft_vocabulary(folder: Path, setup: LayerSetup) -> DraftVocabulary | None:
    """Returns the draft vocabulary of a folder of heads, None where it has none. Raises `ModelError` for a file that
    cannot be read or names tokens that the target does not have."""
    if not has_draft_vocabulary(folder):
        return None
    path = folder / FILE
    try:
        token_ids = load_file(path)["token_ids"]
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path} holds no tensor token_ids that can be read ({error}); copy it again") from error
    is_list = token_ids.dim() == 1 and len(token_ids) > 0 and not token_ids.is_floating_point()
    if not is_list or int(token_ids.min()) < 0 or int(token_ids.max()) >= setup.vocab_size:
        raise ModelError(f"{path}: token_ids must be a list of ids below {setup.vocab_size}, the target's vocabulary")
    return DraftVocabulary(token_ids, setup)


@torch.inference_mode()
def _unembedding(token_ids: Tensor, setup: LayerSetup) -> Tensor:
    """Returns [v, hidden_size] in the setup's dtype: the logits of unit vectors, since drafters do not get the target's
    weights."""
    units = torch.eye(setup.hidden_size, dtype=setup.dtype, device=setup.device)
    starts = range(0, len(units), _ROWS_AT_ONCE)
    columns = [setup.compute_logits(units[start : start + _ROWS_AT_ONCE])[:, token_ids] for start in starts]
    return torch.cat(columns).to(setup.dtype).T.contiguous()
