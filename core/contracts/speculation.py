"""Draft worker and acceptance rule: who guesses the next tokens, and which guesses stand.

One round for a request whose last known token is t: the drafter proposes k tokens, as a chain or as a tree; the
next step computes t and the drafts together (k + 1 rows); the acceptance rule walks from t downwards and
returns the accepted path and one more token, the **bonus token**, drawn from the target's distribution after
that path. So a round yields between 1 and k + 1 tokens.

Drafters and rules run on the rank that samples; their results are sent to the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dovetail.contracts.attention import AttentionLayer
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class DraftCapabilities:
    """What a drafter gives and what it needs."""

    trees: bool = False
    """Can propose trees; the attention backend must then serve tree masks, unless `DraftWorker.proposes_trees` says
    that the options ask for none."""
    probabilities: bool = False
    """Gives the distribution that each draft was drawn from."""
    needs_hidden_states: bool = False
    """Wants the target's last hidden states."""
    confidence: bool = False
    """Gives `Draft.confidence`. Since 1.1."""
    stateless: bool = False
    """Guesses from what a `DraftRequest` holds and from nothing that it saw before: requests of which no draft is
    wanted are left out of the batch, and where none is wanted at all there is no call. Since 1.1."""


@dataclass(frozen=True)
class SpeculationNeed:
    """What the config asks of a drafter or rule; the argument of `check`."""

    device_type: str
    dtype: str
    vocab_size: int
    hidden_size: int
    tensor_parallel: int
    num_tokens: int
    """Most drafts per round that the config allows."""


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter is handed when it is created: views of the target, never the runner."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    num_tokens: int
    device: torch.device
    dtype: torch.dtype
    embed: Callable[[torch.Tensor], torch.Tensor]
    """The target's token embedding: int64 [N] -> [N, hidden_size]. Over several tensor-parallel ranks it raises
    `PluginError`: all ranks would have to take part, and drafters run on one."""
    compute_logits: Callable[[torch.Tensor], torch.Tensor]
    """The target's unembedding: [N, hidden_size] -> [N, vocab_size]. Raises `PluginError` likewise; a drafter that
    needs either refuses `SpeculationNeed.tensor_parallel` above 1 in `check`."""


@dataclass(frozen=True)
class Draft:
    """One request's guesses. Node i is `token_ids[i]`; parents come before children."""

    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    """Index of each node's parent, -1 for children of the last known token. None: a chain."""
    probs: torch.Tensor | None = None
    """[k, vocab_size] float32: the distribution that each node was drawn from. None: drafts were not drawn, which
    counts as a distribution with all its mass on the draft."""
    confidence: Sequence[float] | None = None
    """[k], each in [0, 1]: how likely the drafter thinks it that the node stands if the node before it on its path
    does. With `length: confidence` drafts end where the product along every path gets small. None: where there are
    `probs`, what these say of the token. Since 1.1."""

    @property
    def is_tree(self) -> bool:
        """Whether some node's parent is not the node before it."""
        return self.parents is not None and any(parent != i - 1 for i, parent in enumerate(self.parents))


@dataclass(frozen=True)
class DraftRequest:
    """One request that wants guesses, as it stands after the step."""

    key: int
    token_ids: np.ndarray
    """int32: all known tokens, prompt and output. A view: do not keep it."""
    num_prompt_tokens: int
    max_drafts: int
    """At most this many nodes are used: the config's length, or fewer where the host expects that fewer pay, cut where
    max_tokens or max_model_len is near. 0 while the prompt is incomplete, or where no draft would pay: nothing to
    guess, only states to take in."""
    sampling: SamplingParams
    hidden_rows: np.ndarray
    """int64: rows of `DraftBatch.hidden_states` of the known tokens that this step computed, in order of position.
    The last of them predicted the last token of `token_ids`, unless the prompt is incomplete."""
    uniforms: np.ndarray
    """float64 [max_drafts] in [0, 1): this request's random stream for drafting. Use it, and nothing else,
    to draw, so that a seeded request repeats."""


@dataclass(frozen=True)
class DraftBatch:
    """The requests for which one drafter guesses after one step."""

    requests: Sequence[DraftRequest]
    hidden_states: torch.Tensor | None
    """[N, hidden_size], None unless the drafter declares `needs_hidden_states`. The row of a position is the
    target's state that predicted the token at the next position."""


class DraftWorker(Plugin):
    """Guesses the next tokens of requests.

    A request is known to its drafter by its key, from the first `propose` that holds it to `on_finished`, which comes
    once, on the rank that samples. A request that gives way to others (preemption) keeps its key: until it is back
    there are no proposals for it, its last draft may go without verdict, and positions that were computed before may
    be computed again. So there may be state of more than `max_num_seqs` requests at a time.
    """

    capabilities: ClassVar[DraftCapabilities] = DraftCapabilities()

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        self.options = options
        self.setup = setup

    @classmethod
    def proposes_trees(cls, options: PluginOptions) -> bool:
        """Whether a drafter with these options, an instance of `cls.Options`, proposes trees. Asked only of classes
        whose capabilities name trees. Without override: yes. Since contract 1.1."""
        return True

    def attention_layers(self) -> Sequence[AttentionLayer]:
        """Layers of the drafter's own that cache keys and values. Contract 1.0 does not serve them: a drafter that
        names any is refused at start-up. Without override: none."""
        return ()

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        """One draft per request, in order; None or an empty draft where there is nothing to guess. A drafter that
        raises is switched off for the requests of the batch, and one whose draft cannot be used for the request that
        it was meant for. They go on without it to their end; `on_finished` still comes."""

    def on_verified(self, key: int, accepted: Sequence[int], num_drafted: int) -> None:
        """Tells which nodes of the last draft of request `key` were accepted, of the first `num_drafted` that were
        computed; right before the `propose` that follows. The host may compute fewer nodes than it got, or none
        (then there is no such call)."""
        return None

    def on_finished(self, key: int, token_ids: Sequence[int]) -> None:
        """The request ended, in whatever way; forget its state. `token_ids` is what this rank last knew: tokens of
        a round behind one that ended the request are there too, and a key that never reached `propose` may come."""
        return None


@dataclass(frozen=True)
class VerifyRequest:
    """One request's drafts beside what the target says about them."""

    draft: Draft
    target: torch.Tensor
    """float32 [k + 1, vocab_size]: row 0 is the target's distribution after the last known token, row i + 1
    after node i. Probabilities, after penalties, masks, temperature and truncation; for a greedy request
    all the mass stands on one token."""
    sampling: SamplingParams
    accept_uniforms: np.ndarray
    """float64 [k]: one per node, this request's random stream for acceptance."""
    recover_uniforms: np.ndarray
    """float64 [k + 1]: its stream for drawing the bonus token (or the recovered one), one per depth."""


@dataclass(frozen=True)
class Verdict:
    """What stands: a path of nodes from the root down, and the token that follows it."""

    accepted: Sequence[int]
    """Node indices, each the child of the one before; empty if none stands."""
    next_token_id: int


class AcceptanceRule(Plugin):
    """Decides which drafts stand."""

    lossless: ClassVar[bool]
    """Whether outputs follow the target's distribution exactly (greedy: token for token)."""
    trees: ClassVar[bool] = False
    greedy_only: ClassVar[bool] = False
    """Serves requests with temperature 0 only; others are refused when they arrive."""

    def __init__(self, options: PluginOptions):
        self.options = options

    @abstractmethod
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        """One verdict per request, in order. Where a rule raises or a verdict cannot be, no draft stands, the token is
        drawn as without drafts, and the request goes on without its drafter."""
