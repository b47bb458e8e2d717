"""Draft worker and acceptance rule: what guesses the next tokens, and which draft tokens are accepted.

One round for a request whose last known token is t: the drafter proposes k tokens, as a chain or as a tree; the
next step computes t and the drafts together (k + 1 rows); the acceptance rule walks from t downwards and
returns the accepted path and one more token, the **bonus token**, drawn from the target's distribution after
that path. So a round yields between 1 and k + 1 tokens.

Drafters and rules run on the rank that samples; their results are sent to the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import CausalLM, ModelSize
from dovetail.contracts.needs import at_most, compared, flag, informs
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dovetail.contracts.attention import AttentionModule
    from dovetail.contracts.draft_stages import DraftStage, StageAbilities
    from dovetail.contracts.draft_target import TargetPasses, TopTokens
    from dovetail.contracts.model import ModelContext
    from dovetail.contracts.operators import Operators


@dataclass(frozen=True, kw_only=True)
class DraftCapabilities:
    """What a drafter gives and what it needs."""

    tensor_parallel: int | None = 1
    """Most tensor-parallel ranks of the target: 1 for drafters that use the target's embedding or unembedding, which no
    single rank holds, and do not name them (`CallsTarget`). None: any number."""
    trees: bool = False
    """The drafter can propose trees; the attention backend must then serve tree masks, unless
    `TreesByOption.proposes_trees` returns False for the options."""
    probabilities: bool = False
    """The drafter sets `Draft.probs`, the distribution that each draft token was drawn from."""
    needs_hidden_states: bool = False
    """The drafter reads the target's last hidden states."""
    confidence: bool = False
    """The drafter sets `Draft.confidence`."""
    stateless: bool = False
    """Drafts depend on nothing but the call: on a `DraftRequest` and its states in the same `propose`, never on earlier
    calls, verdicts or requests. What changes no draft may be kept. So the host leaves requests without a wanted draft
    out of the batch, and does not call where no draft is wanted at all."""
    reads_prediction: bool = False
    """The drafter guesses from `DraftRequest.prediction`; requests that bring one are refused where their drafter does
    not."""
    reads_next_token: bool = False
    """The drafter's keys and values at a position also depend on the token at the next position (EAGLE), so that token
    is part of the hash of cached prefixes."""


@dataclass(frozen=True)
class DraftModelInfo:
    """What is known of a drafter's own model (`LoadsModel.model_section`) before weights are read."""

    config: Mapping[str, Any]
    """The keys of Hugging Face's config.json."""
    size: ModelSize
    dtype: str
    vocabulary_difference: str | None = None
    """How the model's tokens differ from the target's, as a phrase; None where they agree or one of the two models has
    no tokenizer."""


_HANDED = informs("it computes with torch, on the device and in the dtype that it is handed")
_OF_TARGET = informs("a fact about the target; `check` judges those that were made for another")


@dataclass(frozen=True)
class SpeculationNeed:
    """What the config asks of a drafter; the argument of `check`."""

    device_type: str = field(metadata=_HANDED)
    dtype: str = field(metadata=_HANDED)
    vocab_size: int = field(metadata=_OF_TARGET)
    hidden_size: int = field(metadata=_OF_TARGET)
    tensor_parallel: int = field(
        metadata=compared(
            "tensor_parallel",
            at_most,
            "{name} drafts for targets on up to {has} tensor-parallel rank, not {asked}: set executor.tensor_parallel "
            "to {has}, or choose another drafter.",
        )
    )
    num_tokens: int = field(metadata=informs("a drafter may guess fewer; `check` judges those that cannot"))
    """Most drafts per round that the config allows."""
    num_layers: int = field(default=0, metadata=_OF_TARGET)
    """Number of the target's decoder layers."""
    kv_dtype: str = field(default="", metadata=informs("`caches` names it; the attention backend is asked"))
    """dtype in which the drafter's own layers, if any, cache keys and values."""
    gives_hidden_layers: bool = field(default=False, metadata=_OF_TARGET)
    """Whether the target's family returns the states between its layers (`ReadsHiddenLayers.hidden_layers`)."""
    skips_layers: bool = field(default=False, metadata=_OF_TARGET)
    """Whether the target's family leaves out layers (`RunsTarget`)."""
    model: DraftModelInfo | None = field(default=None, metadata=informs("the drafter asked for it; `check` judges it"))
    """The drafter's own model; None where it asks for none."""
    has_tokenizer_json: bool = field(default=False, metadata=informs("`check` judges drafters that read text"))
    """Whether `DraftSetup.tokenizer_json` can be given: False where the config asks for another kind of tokenizer, or
    for none."""
    stages: Mapping[str, StageAbilities] = field(
        default_factory=dict, metadata=informs("the drafter named them; `check` judges them")
    )
    """By label, the stages of a drafter that `ComposesDrafters`, in its order."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceCapabilities:
    """What an acceptance rule can do."""

    lossless: bool = False
    """The rule keeps the target's distribution of outputs exactly (greedy: token for token)."""
    trees: bool = False
    """The rule verifies trees, not only chains."""
    sampling: bool = False
    """The rule serves requests with a temperature above 0; otherwise the engine refuses them when they arrive."""
    synthetic: bool = False
    """The rule is for measuring only: it may accept any drafted token, at temperature 0 too, so that tokens are wrong
    by design. Requests whose output must have a form (`SamplingParams.structured_outputs`) are excepted."""


@dataclass(frozen=True)
class AcceptanceNeed:
    """What the config asks of an acceptance rule; the argument of `check`."""

    device_type: str = field(metadata=_HANDED)
    vocab_size: int = field(metadata=_OF_TARGET)
    num_tokens: int = field(metadata=informs("a rule judges drafts of any length"))
    """Most drafts per round, of any drafter."""
    trees: bool = field(
        default=False,
        metadata=compared(
            "trees", flag, "{name} judges chains only, and a drafter proposes trees: choose another rule or drafter."
        ),
    )
    """Whether some drafter proposes trees."""
    lossless: bool = field(
        default=False,
        metadata=compared(
            "lossless",
            flag,
            "{name} is lossy, so that speculation changes tokens, which reproducibility: strict excludes: choose "
            "another rule, or leave reproducibility at default.",
        ),
    )
    """Whether speculation must not change the distribution of outputs (`reproducibility: strict`)."""


@dataclass(frozen=True)
class DraftModel:
    """A drafter's own model, which the host loaded on the rank that drafts."""

    module: CausalLM
    layers: Sequence[AttentionModule]
    """The model's attention layers, for `KeepsLayers.attention_layers`."""
    max_model_len: int
    """Number of positions that the model serves, at most the target's."""
    tokenizer_json: str | None = None
    """The model's own tokenizer, as `DraftSetup.tokenizer_json` is the target's, for a drafter that `ReadsTokenizer`;
    None where it has none."""
    vocab_size: int = 0
    """Width of its logits; 0 where nobody said."""


class DraftPages(ABC):
    """KV pages of a drafter's own attention layers. They belong to the KV blocks of the requests, so prefix sharing,
    copies, preemption and swapping apply to them as to the target's pages."""

    @abstractmethod
    def plan(
        self,
        seq_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        tree_masks: Mapping[int, np.ndarray] | None = None,
    ) -> np.ndarray:
        """Prepares one forward pass over all layers of the drafter, with its own attention backend.

        Request seq_ids[r] has counts[r] >= 1 query tokens, flat and in order of requests, at slots starts[r] ..
        starts[r] + counts[r] - 1, which the pass writes. Slot i is the place of position i, and each query token sees
        all slots before starts[r] and the query tokens of its request up to itself, or those that `tree_masks` names
        (as in `AttentionBatch`, by r). A `DraftRequest` has slots below `len(token_ids) + max_drafts - 1`, and below
        `first_position + len(hidden_rows)`. Call it from `propose` only, for requests of that batch. numpy integers,
        [R] each.

        Returns:
            int64 [T]: the slot of each query token, which is its position where there is no tree.
        """


@dataclass(frozen=True, kw_only=True)
class DraftSetup:
    """What a drafter gets when it is created: views of the target, never the runner."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    num_tokens: int
    device: torch.device
    dtype: torch.dtype
    embed: Callable[[torch.Tensor], torch.Tensor]
    """The target's token embedding: int64 [N] -> [N, hidden_size]. With several ranks it raises `PluginError` unless
    the drafter is a `CallsTarget` that names it: all ranks would have to take part, and drafters run on one."""
    compute_logits: Callable[[torch.Tensor], torch.Tensor]
    """The target's unembedding: [N, hidden_size] -> [N, vocab_size]. Raises `PluginError` likewise; a drafter that
    needs either is a `CallsTarget`, leaves `DraftCapabilities.tensor_parallel` at 1, or refuses more in `check`."""
    num_layers: int
    """Number of the target's decoder layers."""
    distributions: Callable[[torch.Tensor, Sequence[SamplingParams]], torch.Tensor]
    """Draft logits [N, vocab_size] and the parameters of each row's request -> float32 [N, vocab_size]: probabilities
    after temperature, min_p, top_k and top_p, as the host computes them for the target's logits; all the mass on the
    most likely token where the temperature is 0. Penalties and biases are not applied: acceptance corrects for them."""
    draw: Callable[[torch.Tensor, np.ndarray], torch.Tensor]
    """Probabilities of `distributions` [N, vocab_size] and float64 [N] uniforms -> int64 [N] tokens, none of
    probability 0."""
    wants_confidence: bool = False
    """Whether the draft-length policy reads `Draft.confidence`; otherwise leave it None where it takes time to
    compute."""
    tokenizer_json: str | None = None
    """The target's tokenizer in the `tokenizers` library's JSON form, for a drafter that `ReadsTokenizer`; None for
    others, and where there is none."""
    stages: Mapping[str, DraftStage] = field(default_factory=dict)
    """By label, what a drafter that `ComposesDrafters` asked for, in its order."""
    target: TargetPasses | None = None
    """Passes over some of the target's layers, for a drafter that is a `RunsTarget`; None for others."""


@dataclass(frozen=True, kw_only=True)
class LayerSetup(DraftSetup):
    """What a drafter with layers of its own gets: one that is a `BuildsLayers`, `LoadsModel` or `KeepsLayers`."""

    create_context: Callable[[], ModelContext]
    """Makes a context for building a module of `dovetail.nn`: one rank, the target's device, dtypes, length and set of
    operators, and the method that `BuildsLayers.quantization` asked for."""
    pages: DraftPages
    """The KV pages of `KeepsLayers.attention_layers`."""
    model: DraftModel | None = None
    """The model that `LoadsModel.model_section` asked for."""


@dataclass(frozen=True)
class Draft:
    """One request's guesses. Node i is `token_ids[i]`; parents come before children.

    Sequences are lists, tuples, ranges, numpy arrays and the like, of ints (no bools). The host copies them, and
    refuses invalid drafts, see `DraftWorker.propose`.
    """

    token_ids: Sequence[int]
    parents: Sequence[int] | None = None
    """Index of each node's parent, -1 for children of the last known token. None: a chain."""
    probs: torch.Tensor | None = None
    """[k, vocab_size] float32 on `DraftSetup.device`: the distribution that each node was drawn from, which gives its
    token a probability above 0. The host keeps it until the draft is verified: do not write to it afterwards. None:
    drafts were not drawn, which counts as a distribution with all its mass on the draft."""
    confidence: Sequence[float] | None = None
    """[k], each in [0, 1]: the drafter's probability that the node is accepted if the node before it on its path is.
    With `length: confidence` a draft ends where the product along every path gets small. None: the probability of the
    token in `probs`, where there are any."""

    from_prediction: bool = False
    """Whether the tokens were read from `DraftRequest.prediction`; `RequestMetrics` counts these, and how many of them
    were accepted."""

    @property
    def is_tree(self) -> bool:
        """Whether the draft is no chain: some node's parent is not the node before it."""
        return self.parents is not None and any(parent != i - 1 for i, parent in enumerate(self.parents))

    @property
    def parent_indices(self) -> list[int]:
        """[k]: index of each node's parent, for chains too."""
        return list(range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents)

    @property
    def depths(self) -> list[int]:
        """[k]: nodes on the path from the root down to each node, itself included: 1 for children of the last known
        token."""
        depths: list[int] = []
        for parent in self.parent_indices:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass(frozen=True)
class DraftRequest:
    """One request that wants a draft, in its state after the step."""

    seq_id: int
    token_ids: np.ndarray
    """int32: all known tokens, prompt and output. A read-only view: do not keep it."""
    num_prompt_tokens: int
    max_drafts: int
    """Most nodes that are used: the config's length, or fewer where the draft-length policy expects that fewer pay, or
    where max_tokens or max_model_len is near. The host cuts longer drafts, and warns of drafts longer than
    `DraftSetup.num_tokens`, which can never be used. 0 while the prompt is incomplete, or where no draft would pay: the
    drafter only reads the states."""
    sampling: SamplingParams
    hidden_rows: np.ndarray
    """int64: rows of `DraftBatch.hidden_states` of the known tokens that this step computed, in order of position.
    The last of them predicted the last token of `token_ids`, unless the prompt is incomplete. For a drafter that reads
    no states only their number counts: that of the positions to read, of this step and of those that were put off."""
    uniforms: np.ndarray
    """float64 [max_drafts] in [0, 1): this request's random stream for drafting. Use it, and nothing else,
    to draw, so that a seeded request repeats."""
    forced: Sequence[int] = ()
    """Tokens that the request's grammar says will come next whatever is drawn, at most `max_drafts`; empty where it has
    no grammar, or there is a choice. A drafter need not look at them: the host itself puts them in the place of a draft
    that begins otherwise, without a verdict for the drafter."""
    first_position: int = 0
    """Position of the first of `hidden_rows`: the target computed the `len(hidden_rows)` positions from here on in this
    step (or, where the drafter's calls were put off, in earlier ones or as a cached prefix), and before them
    everything."""
    top_tokens: TopTokens | None = None
    """What the target finds likely after the rows that it computed; None unless the drafter is a `ReadsTopTokens`, and
    where there are no such rows."""
    prediction: np.ndarray | None = None
    """int32: what the request expects its output to be (`SamplingParams.prediction`), read-only; None where it says
    nothing."""


@dataclass(frozen=True)
class DraftBatch:
    """The requests for which one drafter proposes drafts after one step."""

    requests: Sequence[DraftRequest]
    hidden_states: torch.Tensor | None
    """[N, hidden_size], None unless the drafter declares `needs_hidden_states`. The row of a position is the
    target's state that predicted the token at the next position."""
    layer_states: torch.Tensor | None = None
    """[N, len(hidden_layers) * hidden_size], the states that `ReadsHiddenLayers.hidden_layers` asks for, concatenated;
    None where it asks for none."""


class DraftWorker(Plugin):
    """Guesses the next tokens of requests.

    A request is known to its drafter by its seq_id, from the first `propose` that holds it to `on_finished`, which
    comes once, on the rank that samples. A request that is preempted keeps its seq_id: until it is back
    there are no proposals for it, its last draft may go without verdict, and positions that were computed before may
    be computed again. So there may be state of more than `max_num_seqs` requests at a time. A step after which no draft
    is wanted may pass without a proposal, so more tokens may have come since the last one than were drafted. Once a
    request ended, forget its seq_id: nothing may follow from a seq_id that comes again.

    A draft depends on its own request alone, and on finished requests where the drafter learns from them. Other
    requests of the batch, or under way, do not change it.

    Each optional ability is a class of its own, which a drafter derives from as well; the host asks by isinstance:
    `TreesByOption`, `LearnsFromRequests`, `ReadsTokenizer`, `ReadsHiddenLayers`, `BuildsLayers`, `LoadsModel`,
    `KeepsLayers`, and those of `dovetail.contracts.draft_target` and `dovetail.contracts.draft_stages`.

    Order of calls: `model_section` and `stages`, `check`, `reads_tokenizer`, `quantization`, `caches`, `hidden_layers`
    before any weight is read; then on the rank that drafts `__init__`, which reads the drafter's weights, and
    `attention_layers`.
    """

    capabilities: ClassVar[DraftCapabilities] = DraftCapabilities()

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        self.options = options
        self.setup = setup

    @abstractmethod
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        """Returns one draft per request, in order; None or an empty draft where the drafter has no guess. Where it
        raises, the host switches it off for the requests of the batch; where a draft is invalid, for its request. They
        go on without it to their end; `on_finished` still comes."""

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        """Tells which nodes of the last draft of request `seq_id` were accepted, of the first `num_drafted` that were
        computed; right before the `propose` that follows. The host may compute fewer nodes than it got, or none
        (then there is no such call)."""
        return None

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """The request ended, in whatever way; forget its state. `token_ids` is what this rank last knew: tokens of
        a round behind one that ended the request are there too, and a seq_id that never reached `propose` may come."""
        return None


class TreesByOption(DraftWorker):
    """A drafter whose capabilities include trees, and whose options decide whether it proposes any."""

    @classmethod
    @abstractmethod
    def proposes_trees(cls, options: Any) -> bool:
        """Returns whether a drafter with these options, an instance of `cls.Options`, proposes trees."""


class LearnsFromRequests(DraftWorker):
    """A drafter that also guesses from finished requests."""

    @abstractmethod
    def forget_finished(self) -> None:
        """Drops what the drafter learned, so that it is as when it was created. The host calls it between measurements,
        while the drafter knows no request."""


class ReadsTokenizer(DraftWorker):
    """A drafter that reads or writes text: it is handed tokenizers (`DraftSetup.tokenizer_json`, and that of a model of
    its own, `DraftModel.tokenizer_json`)."""

    @classmethod
    @abstractmethod
    def reads_tokenizer(cls, options: Any) -> bool:
        """Returns whether a drafter with these options, an instance of `cls.Options`, wants them: workers then wait
        until the tokenizer is read. Called after `check`."""


class ReadsHiddenLayers(DraftWorker):
    """A drafter that reads states between the target's layers (`DraftBatch.layer_states`)."""

    @classmethod
    @abstractmethod
    def hidden_layers(cls, options: Any, need: SpeculationNeed) -> Sequence[int]:
        """Returns which states the drafter reads: i is the input of layer i (0: the embeddings), residual included;
        `need.num_layers` is the input of the final norm. Empty: none with these options. Called after `check`."""


class BuildsLayers(DraftWorker):
    """A drafter that builds layers with `LayerSetup.create_context`."""

    setup: LayerSetup

    @classmethod
    @abstractmethod
    def quantization(cls, options: Any) -> str | Mapping[str, Any] | None:
        """Returns how the drafter's linear layers hold their weights: the name of a quantization method, or a section
        with its options; "auto": a method that hardly changes drafts (`QuantizationCapabilities.for_drafters`), where
        there is one for the device; None: full precision. Read it from an option of the same name. A model of
        `LoadsModel` has a key of its own."""


class LoadsModel(DraftWorker):
    """A drafter that guesses with a model which the host finds and loads (`LayerSetup.model`)."""

    setup: LayerSetup

    @classmethod
    @abstractmethod
    def model_section(cls, options: Any) -> Mapping[str, Any] | None:
        """Returns keys of the config's section `model` (path, revision, dtype, quantization, source, weight_format,
        family, hf_overrides); None: no model with these options. Read them from options of the same names, so that
        paths are resolved against their config file. The host puts what it found into `SpeculationNeed.model`, and the
        module into `LayerSetup.model`."""


class KeepsLayers(DraftWorker):
    """A drafter with attention layers, whose keys and values are in further KV tensors of the requests' KV blocks.

    Prefix caching shares blocks of finished and running requests, so the drafter must keep this promise: when `propose`
    returns, its pages are right for every position that the target computed, below `first_position + len(hidden_rows)`
    of each request of the batch, for incomplete prompts and requests with `max_drafts` 0 too. It may rely on its pages
    below `first_position`. Positions after the computed ones are scratch: it overwrites later what it wrote for drafts
    that are not accepted, and a preemption loses it. The host calls `propose` after every step that computes tokens of
    the drafter's requests; only steps after which no drafts are wanted are combined, at the latest until they fill a KV
    block. The host does not share blocks of a request whose drafter failed.

    Where the drafter reads no states of the target and its draft length adapts, the host knows what it has read by KV
    block and puts its calls off until drafts are wanted: after the first token of a request at the earliest. Then
    `first_position` is the first position that its pages lack, which may lie in a cached prefix, and a long prompt
    comes in parts, after one step each, with `max_drafts` 0 until the last.

    The host allocates the pages and binds the layers to an attention backend of their own (the drafter's key
    `attention` in the config).
    """

    setup: LayerSetup

    @classmethod
    @abstractmethod
    def caches(cls, options: Any, need: SpeculationNeed) -> Sequence[KVSpec]:
        """Returns what the drafter's attention layers cache, one entry per layer, from configs alone: for memory
        estimates and the choice of its attention backend. Called after `check` returned no reasons. The host refuses a
        drafter whose `attention_layers` cache something else, in whatever order; only a window may be left out here."""

    @abstractmethod
    def attention_layers(self) -> Sequence[AttentionModule]:
        """Returns the drafter's attention layers, in an order of its choice. The host binds them before the first
        `propose`."""


class TargetView(ABC):
    """The target's distributions for one request with k draft tokens: k + 1 rows, row 0 after the last known token, row
    i + 1 after node i. They are computed when they are read: read only what the rule needs, and keep nothing after
    `verify`."""

    @abstractmethod
    def probs(self) -> torch.Tensor:
        """float32 [k + 1, vocab_size], read-only: the target's distributions after penalties, masks, temperature and
        truncation; for a greedy request all the mass is on one token. See `targets_of` for several requests."""

    @abstractmethod
    def tokens(self) -> Sequence[int]:
        """[k + 1]: the token that a step without drafts would draw from each row: the most likely one for a greedy
        request, for others the one that `VerifyRequest.recover_uniforms` at the row's depth selects. It is much cheaper
        than `probs`, and all that a rule needs for drafts that were not drawn."""

    @abstractmethod
    def joined(self, views: Sequence[TargetView]) -> torch.Tensor:
        """Returns what `targets_of` returns for requests with these views, all of one `verify`."""


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """One request's draft with the target's distributions for it."""

    draft: Draft
    target: TargetView
    sampling: SamplingParams
    accept_uniforms: np.ndarray
    """float64 [k]: one per node, this request's random stream for acceptance."""
    recover_uniforms: np.ndarray
    """float64 [k + 1]: its stream for drawing the bonus token (or the recovered one), one per depth."""


def targets_of(requests: Sequence[VerifyRequest]) -> torch.Tensor:
    """Returns `TargetView.probs` of several requests (at least one) of one `verify`, concatenated: float32 [sum of k +
    1, vocab_size]. The caller may keep and change it. On a GPU the host waits about as often as for one request, so a
    rule that reads many should ask for them together."""
    return requests[0].target.joined([request.target for request in requests])


@dataclass(frozen=True)
class Verdict:
    """What is accepted: a path of nodes from the root down, and the token that follows it."""

    accepted: Sequence[int]
    """Node indices, each the child of the one before; empty if no node is accepted."""
    next_token_id: int


class AcceptanceRule(Plugin):
    """Decides which draft tokens are accepted.

    A lossy rule may prefer some tokens to others, but never accepts a node or returns a token with probability 0 in the
    target's row before it: masks, grammars and truncation exclude it (a `synthetic` rule may accept such a node, but
    returns no such token). The token that follows the accepted path comes from the row of the path's last node. A
    verdict depends on its request and the request's uniforms alone.
    """

    capabilities: ClassVar[AcceptanceCapabilities] = AcceptanceCapabilities()

    def __init__(self, options: PluginOptions):
        self.options = options

    def use_operators(self, operators: Operators) -> None:
        """Gives the rule the target's set of operators, to verify many drafts in one launch (`AcceptsChains`). The host
        calls it once, before the first `verify`. The default ignores it."""
        return None

    @abstractmethod
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        """Returns one verdict per request, in order. Where the rule raises or a verdict is invalid, no draft token is
        accepted, the host draws the token as without drafts, and the request goes on without its drafter."""
