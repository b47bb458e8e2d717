"""`flash_prefill` in Triton's interpreter, with plain torch functions in place of the libraries; see
paged_triton_cases.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.attention_backends.flash import libraries
from dovetail.attention_backends.flash.backend import FlashOptions
from dovetail.attention_backends.flash.libraries import FlashAttention2, FlashAttention3, FlashInfer, TorchVarlen
from dovetail.attention_backends.flash_prefill import FlashPrefillBackend
from dovetail.testing.attention_cases import CaseShape, random_case, random_tree
from tests.attention_backends.test_flash import (
    PagedWrapper,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    varlen_attn,
)

LIBRARIES = {
    "torch": (TorchVarlen, varlen_attn),
    "flash_attn": (FlashAttention2, flash_attn_varlen_func),
    "flash_attn_3": (FlashAttention3, flash_attn_with_kvcache),
    "flashinfer": (FlashInfer, PagedWrapper),
}


def on_torch(library):
    kind, function = LIBRARIES[library]

    class OnTorch(FlashPrefillBackend):
        def _create_attention(self, options, setup):
            return kind(setup, function)

    return OnTorch


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_prompts_and_other_rows_in_one_step(library, has_window, monkeypatch):
    """Two prompts with decode and verify rows between them and a tree; pages lie apart."""
    monkeypatch.setattr(libraries, "_WORKSPACE_BYTES", 1)
    shape = CaseShape(
        head_size=16, block_size=16, has_window=has_window, lengths=((40, 10), (1, 30), (5, 20), (35, 0), (4, 9))
    )
    case = random_case(9, shape)
    trees = [replace(request, tree=None) for request in case.requests]
    trees[2] = replace(trees[2], tree=random_tree(np.random.default_rng(0), 5))
    case = replace(case, requests=tuple(trees))
    output = case.run_from_scratch(on_torch(library)(FlashOptions(), case.setup), padding=8)
    torch.testing.assert_close(output.double(), case.expected(), atol=5e-6, rtol=5e-6)
