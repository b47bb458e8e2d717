"""One sequence as the engine holds it: what schedulers see, and its tokens and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import RequestState, RequestStatus
from dovetail.engine.adapters.adapter import Adapter


@dataclass(frozen=True, slots=True)
class DraftBlocks:
    """What a drafter with pages of its own asks of the blocks of its sequences."""

    seed: bytes
    """What block hashes start from (`dovetail.engine.kv.hashing.drafter_seed`)."""
    hash_ahead: int
    """Tokens behind a block that its content depends on; see `dovetail.engine.kv.hashing.extend_block_hashes`."""
    num_lookahead_tokens: int
    """Tokens beyond the wanted ones for which the drafter needs slots."""


class Sequence(RequestState):
    """A request's tokens and blocks.

    The engine writes tokens and counts; the KV manager writes `block_ids`, `capacity`, `host_block_ids`, `block_hashes`
    and `commit_at`.
    """

    __slots__ = (
        "_is_asked_to_hold",
        "_is_paused",
        "_waits_for_adapter",
        "_waits_for_blocks",
        "_waits_for_grammar",
        "adapter",
        "block_hashes",
        "block_ids",
        "capacity",
        "commit_at",
        "drafter",
        "eos_token_ids",
        "fork_parent",
        "grammar",
        "hash_ahead",
        "hash_seed",
        "host_block_ids",
        "max_total_tokens",
        "needs_every_state",
        "num_lookahead_tokens",
        "plain_hash_seed",
        "pooling",
        "prediction",
        "retain_blocks",
        "sampling",
        "seed",
        "seq_id",
        "stop_ids",
        "token_ids",
        "token_types",
    )

    def __init__(
        self,
        seq_id: int,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        hash_seed: bytes = b"",
        fork_parent: Sequence | None = None,
        max_total_tokens: int = 1 << 30,
        stop_ids: frozenset[int] = frozenset(),
        eos_token_ids: tuple[int, ...] = (),
        seed: int = 0,
        drafter: str | None = None,
        draft_blocks: DraftBlocks | None = None,
        grammar: OutputGrammar | None = None,
        prediction: tuple[int, ...] = (),
        adapter: Adapter | None = None,
        pooling: PoolingParams | None = None,
        needs_every_state: bool = False,
        token_types: tuple[int, ...] = (),
    ):
        super().__init__(
            request_id,
            len(prompt_token_ids),
            priority,
            arrival_time,
            max_tokens=max_total_tokens - len(prompt_token_ids),
            extra=MappingProxyType(sampling.extra),
        )
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.sampling = sampling
        self.start_hashes(hash_seed, draft_blocks)
        self.hash_ahead = 0 if draft_blocks is None else draft_blocks.hash_ahead
        self.num_lookahead_tokens = 0 if draft_blocks is None else draft_blocks.num_lookahead_tokens
        self._start_blocks(fork_parent)
        self.max_total_tokens = max_total_tokens
        """The sequence ends when it has this many tokens."""
        self.stop_ids, self.eos_token_ids = stop_ids, eos_token_ids
        self.seed = seed
        """Root of the sequence's random streams."""
        self.drafter = drafter
        self.grammar = grammar
        self.prediction = prediction
        self.token_types = token_types
        """The type of each token of the prompt; empty: all are 0."""
        self.pooling = pooling
        """It ends when its prompt is computed, with what is pooled from it; None: it generates."""
        self.needs_every_state = needs_every_state
        """Workers must compute every token of it in one go: its blocks are neither found in the prefix cache nor
        swapped to the host."""
        self.retain_blocks = False
        """Keep the blocks when the sequence ends, for sequences that will be forked from it."""
        self.adapter = adapter
        """What is added to the weights; None: nothing, or what `wait_for_adapter` waits for."""
        self._is_asked_to_hold = self._is_paused = False
        self._waits_for_grammar = self._waits_for_adapter = self._waits_for_blocks = False

    def _start_blocks(self, fork_parent: Sequence | None) -> None:
        self.fork_parent = fork_parent
        """A sequence with the same prompt whose blocks this one may share when it is admitted."""
        self.block_ids: list[list[int]] = []
        """Per KV group; empty while the sequence holds no device blocks. Id 0: a block that the window freed."""
        self.capacity = 0
        """Tokens that its device blocks hold, or 0 where some may have to be copied before they are written to."""
        self.host_block_ids: list[list[int]] = []
        """Per KV group, while swapped out."""
        self.commit_at = 0
        """num_computed_tokens at which the KV manager has something to commit: most steps skip the call."""

    def hold(self, is_held: bool) -> None:
        """What was asked of `RequestControl`."""
        self._is_asked_to_hold = is_held
        self._settle_hold()

    def pause(self, is_paused: bool) -> None:
        """The sequence is held while its engine is paused, whatever was asked."""
        self._is_paused = is_paused
        self._settle_hold()

    def wait_for_grammar(self, waits: bool) -> None:
        """The sequence is held while its grammar is compiled, whatever was asked."""
        self._waits_for_grammar = waits
        self._settle_hold()

    def wait_for_blocks(self, waits: bool) -> None:
        """The sequence is held while a connector loads blocks of its prompt, whatever was asked."""
        self._waits_for_blocks = waits
        self._settle_hold()

    def wait_for_adapter(self) -> None:
        """The sequence is held until `take_adapter`, whatever was asked. It has computed nothing."""
        self._waits_for_adapter = True
        self._settle_hold()

    def take_adapter(self, adapter: Adapter | None, hash_seed: bytes, draft_blocks: DraftBlocks | None) -> None:
        """The adapter is read, and with it is known what block hashes start from. None: it could not be read."""
        self.adapter = adapter
        self.start_hashes(hash_seed, draft_blocks)
        self._waits_for_adapter = False
        self._settle_hold()

    def start_hashes(self, seed: bytes, draft_blocks: DraftBlocks | None) -> None:
        """Its blocks are named by another `seed` from now on; it has none."""
        self.plain_hash_seed = seed
        """What the block hashes start from where no drafter fills pages of its own (`prefix_seed`)."""
        self.hash_seed = seed if draft_blocks is None else draft_blocks.seed
        """What they start from now."""
        self.block_hashes: list[bytes] = []
        """Content hashes of the leading full blocks, computed on demand; valid while the tokens do not change."""

    def _settle_hold(self) -> None:
        self.is_held = self.is_stopped

    def await_turn(self) -> None:
        """The sequence is held while others are scheduled, until `end_turn`; within one call of `schedule`."""
        self.is_held = True

    def end_turn(self) -> None:
        """Held only for the other reasons, if there are any."""
        self._settle_hold()

    @property
    def is_stopped(self) -> bool:
        """Whether it is held for another reason than that others have their turn."""
        waits = self._waits_for_grammar or self._waits_for_adapter or self._waits_for_blocks
        return waits or self._is_asked_to_hold or self._is_paused

    @property
    def is_paused(self) -> bool:
        """Whether a pause of the engine holds it."""
        return self._is_paused

    @property
    def is_asked_to_hold(self) -> bool:
        """Whether somebody holds it (`RequestControl`)."""
        return self._is_asked_to_hold

    @property
    def waits_for_adapter(self) -> bool:
        """Whether its adapter is being read."""
        return self._waits_for_adapter

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    def leave_drafter(self) -> None:
        """Goes on without its drafter. Blocks that are filled from now on lack the drafter's pages, so they are found
        by other hashes."""
        self.drafter = None
        self.num_lookahead_tokens = 0
        if self.hash_seed != self.plain_hash_seed:
            self.hash_seed = self.plain_hash_seed
            self.hash_ahead = 0
            self.block_hashes = []

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens
