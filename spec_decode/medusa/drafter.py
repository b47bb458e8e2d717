"""Medusa: small heads on the target's last hidden state, each of which guesses one of the tokens to come.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv 2401.10774).
Head k is `unembed(x + SiLU(W x + b))` with x the hidden state that predicted the last known token; it guesses the token
k + 1 places after that one, without looking at the tokens in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dovetail.contracts.draft_target import CallsTarget, CopiesTarget, NamesWeights, TargetParts, UpdatesWeights
from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    BuildsLayers,
    Draft,
    DraftBatch,
    DraftCapabilities,
    LayerSetup,
    SpeculationNeed,
    TreesByOption,
)
from dovetail.nn.row_max import row_max
from dovetail.spec_decode.draft_vocabulary import has_draft_vocabulary, load_draft_vocabulary
from dovetail.spec_decode.medusa.bundled import check_target, find_bundled
from dovetail.spec_decode.medusa.format import HeadsLayout, load_weights, named_shapes, read_layout, replace_weights
from dovetail.spec_decode.medusa.tree import DraftTree, best_tree, chain, from_paths


class MedusaOptions(PluginOptions):
    """Options of `medusa`: the heads, and the shape of drafts."""

    path: Path | None = None
    """Folder with config.json and medusa_lm_head.safetensors (or .pt), relative to the config file. Left out: the heads
    that come with Dovetail, for the embedded default model."""
    tree: Literal["auto"] | tuple[tuple[int, ...], ...] | None = None
    """null: a chain of each head's best candidate. auto: the tree of num_tokens nodes that the heads' measured
    accuracies make the best one. Or the tree itself, one list of ranks per node, as FasterDecoding's medusa_choices."""
    quantization: str | dict[str, Any] | None = "auto"
    """How the unembedding of a draft vocabulary of its own is held: a quantization method, null for full precision, or
    `auto`, which rounds to 8 bits where that is fast."""


class MedusaDrafter(BuildsLayers, TreesByOption, UpdatesWeights, NamesWeights, CopiesTarget, CallsTarget):
    """Guesses with trained heads. Chains and trees are the most likely candidates, not draws: no draft distributions
    are given, so an acceptance rule counts each draft as certain."""

    contract: ClassVar[tuple[int, int]] = (1, 4)
    Options = MedusaOptions
    capabilities = DraftCapabilities(
        tensor_parallel=None, trees=True, needs_hidden_states=True, confidence=True, stateless=True
    )
    options: MedusaOptions

    @classmethod
    def proposes_trees(cls, options: PluginOptions) -> bool:
        """Whether the option `tree` asks for a tree."""
        assert isinstance(options, MedusaOptions)
        return options.tree is not None

    @classmethod
    def quantization(cls, options: MedusaOptions) -> str | Mapping[str, Any] | None:
        return options.quantization

    @classmethod
    def target_parts(cls, options: MedusaOptions, need: SpeculationNeed) -> TargetParts:
        """The output layer, unless the heads have their own; bundled heads know their target by its embedding."""
        layout = read_layout(_folder(options, need.hidden_size, need.vocab_size))
        return TargetParts(embedding=options.path is None, output=not layout.has_unembedding)

    @classmethod
    def check(cls, need: SpeculationNeed, options: Any, environment: Environment) -> list[str]:
        """Looks at the folder's config and at the shapes of its tensors."""
        try:
            layout = read_layout(_folder(options, need.hidden_size, need.vocab_size))
        except ModelError as error:
            return [str(error)]
        reasons = [*_size_problems(layout, need.hidden_size, need.vocab_size)]
        folder = layout.file.parent
        rounds = not layout.has_unembedding and has_draft_vocabulary(folder)
        if options.quantization not in (None, "auto") and not rounds:
            reasons.append(
                f"quantization is for the unembedding of a draft vocabulary, which the heads in {folder} do not have; "
                "leave it out"
            )
        try:
            _draft_tree(options, layout, need.num_tokens)
        except ValueError as error:
            reasons.append(str(error))
        return reasons

    def __init__(self, options: MedusaOptions, setup: LayerSetup):
        super().__init__(options, setup)
        folder = _folder(options, setup.hidden_size, setup.vocab_size)
        layout = read_layout(folder)
        problems = _size_problems(layout, setup.hidden_size, setup.vocab_size)
        if problems:
            raise ModelError(f"{folder}: {'; '.join(problems)}")
        if options.path is None:
            check_target(folder, setup.embed, setup.device)
        try:
            self._tree = _draft_tree(options, layout, setup.num_tokens)
        except ValueError as error:
            raise ModelError(f"{folder}: {error}") from error
        self._layout = layout
        self._weights = load_weights(layout, setup.device, setup.dtype)
        self._vocabulary = None if layout.has_unembedding else load_draft_vocabulary(folder, setup)

    def expected_weights(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors of the file, with its prefix."""
        return named_shapes(self._layout, self._weights)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        replace_weights(self._layout, self._weights, weights)

    def own_weights(self) -> Iterable[Tensor]:
        """The heads, and the unembedding of a draft vocabulary."""
        weights = self._weights
        yield from (weights.blocks, weights.biases)
        if weights.unembed is not None:
            yield weights.unembed
        if self._vocabulary is not None:
            yield from self._vocabulary.tensors()

    def target_changed(self) -> None:
        """A draft vocabulary has rows of the target's unembedding."""
        if self._vocabulary is not None:
            self._vocabulary.read_target(self.setup)

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        """One pass of the heads over the requests that want drafts."""
        assert batch.hidden_states is not None
        drafts: list[Draft | None] = [None] * len(batch.requests)
        wanting = [i for i, r in enumerate(batch.requests) if r.max_drafts > 0 and len(r.hidden_rows) > 0]
        if not wanting:
            return drafts
        rows = torch.tensor([int(batch.requests[i].hidden_rows[-1]) for i in wanting], device=self.setup.device)
        longest = max(batch.requests[i].max_drafts for i in wanting)
        num_heads = 1 + max(self._tree.heads[:longest])
        logits = self._logits(batch.hidden_states[rows], num_heads)
        count = self._tree.num_candidates
        values, best = _best(logits, count)
        ids = best if self._vocabulary is None else self._vocabulary.token_ids[best]
        candidates = ids.transpose(0, 1).tolist()
        shares: list[Any] = [None] * len(wanting)
        if self.setup.wants_confidence:
            shares = (values.float() - logits.float().logsumexp(-1, keepdim=True)).exp().transpose(0, 1).tolist()
        for i, of_heads, share in zip(wanting, candidates, shares, strict=True):
            drafts[i] = self._draft(of_heads, share, batch.requests[i].max_drafts)
        return drafts

    def _draft(
        self, candidates: Sequence[Sequence[int]], shares: Sequence[Sequence[float]] | None, max_drafts: int
    ) -> Draft:
        """Its nodes from the candidates of each head, and their probabilities there, which no token in between bears
        on."""
        tree = self._tree
        nodes = list(zip(tree.heads[:max_drafts], tree.ranks[:max_drafts], strict=True))
        tokens = [candidates[head][rank] for head, rank in nodes]
        confidence = None if shares is None else [min(1.0, shares[head][rank]) for head, rank in nodes]
        return Draft(tokens, None if tree.is_chain else tree.parents[:max_drafts], confidence=confidence)

    def _logits(self, hidden: Tensor, num_heads: int) -> Tensor:
        """What the first heads say of the tokens they guess: [N, hidden_size] -> [num_heads, N, tokens]."""
        weights = self._weights
        x = hidden.to(self.setup.dtype).expand(num_heads, *hidden.shape)
        for matrix, bias in zip(weights.blocks, weights.biases, strict=True):
            x = x + torch.nn.functional.silu(torch.baddbmm(bias[:num_heads], x, matrix[:num_heads]))
        if weights.unembed is not None:
            return torch.bmm(x, weights.unembed[:num_heads])
        unembed = self.setup.compute_logits if self._vocabulary is None else self._vocabulary.logits
        return unembed(x.reshape(-1, x.shape[-1])).view(*x.shape[:2], -1)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[num_heads, N, tokens] -> the highest `count` of each row and their places, both [num_heads, N, count]."""
    if count > 1:
        top = logits.topk(count)
        return top.values, top.indices
    # On a CPU a fraction of the time of topk.
    values, places = row_max(logits.flatten(0, 1))
    return values.view(*logits.shape[:2], 1), places.view(*logits.shape[:2], 1)


def _folder(options: MedusaOptions, hidden_size: int, vocab_size: int) -> Path:
    if options.path is not None:
        return options.path
    folder = find_bundled(hidden_size, vocab_size)
    if folder is None:
        raise ModelError(
            f"no heads come with Dovetail for a target with hidden size {hidden_size} and {vocab_size} tokens: write "
            "the folder of heads that were trained for it as `path` (examples/train_drafters makes them)"
        )
    return folder


def _size_problems(layout: HeadsLayout, hidden_size: int, vocab_size: int) -> list[str]:
    problems = []
    if layout.hidden_size != hidden_size:
        problems.append(
            f"its heads were trained for a hidden size of {layout.hidden_size}, the target has {hidden_size}"
        )
    if layout.vocab_size not in (None, vocab_size):
        problems.append(f"its heads know {layout.vocab_size} tokens, the target {vocab_size}")
    return problems


def _draft_tree(options: MedusaOptions, layout: HeadsLayout, num_tokens: int) -> DraftTree:
    """The nodes that are guessed. Raises `ValueError` that says what does not go together."""
    if options.tree is None:
        if num_tokens > layout.num_heads:
            raise ValueError(f"num_tokens is {num_tokens}, and there are {layout.num_heads} heads, one token each")
        return chain(num_tokens)
    if options.tree == "auto":
        if not layout.accuracies or len(layout.accuracies) > layout.num_heads:
            raise ValueError(
                "tree: auto needs the heads' measured accuracies, `medusa_head_accuracies` in their config.json, at "
                "most one list per head; give the tree's paths instead"
            )
        return best_tree(layout.accuracies, num_tokens)
    tree = from_paths(sorted(options.tree, key=lambda path: (len(path), path)))
    if len(tree.parents) > num_tokens:
        raise ValueError(f"the tree has {len(tree.parents)} nodes, and num_tokens allows {num_tokens}")
    if tree.num_heads > layout.num_heads:
        raise ValueError(f"the tree is {tree.num_heads} tokens deep, and there are {layout.num_heads} heads")
    return tree
