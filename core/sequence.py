"""One sequence as the engine holds it: what schedulers see, and its tokens and blocks."""

from __future__ import annotations

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import RequestState


class Sequence(RequestState):
    """A request's tokens and blocks.

    The engine writes tokens and counts; the KV manager writes `block_ids`, `host_block_ids` and `block_hashes`.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "fork_parent",
        "hash_seed",
        "host_block_ids",
        "key",
        "sampling",
        "token_ids",
    )

    def __init__(
        self,
        key: int,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        hash_seed: bytes = b"",
        fork_parent: Sequence | None = None,
    ):
        super().__init__(request_id, len(prompt_token_ids), priority, arrival_time)
        self.key = key
        self.token_ids = list(prompt_token_ids)
        self.sampling = sampling
        self.hash_seed = hash_seed
        """Salt of the first block's hash: adapter, weight version, cache salt."""
        self.fork_parent = fork_parent
        """A sequence with the same prompt whose blocks this one may share when it is admitted."""
        self.block_ids: list[list[int]] = []
        """Per KV group; empty while the sequence holds no device blocks. 0 stands for a freed window block."""
        self.host_block_ids: list[list[int]] = []
        """Per KV group, while swapped out."""
        self.block_hashes: list[bytes] = []
        """Content hashes of the leading full blocks, computed on demand; valid as long as the tokens stand."""

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens
