import numpy as np, torch
from collections.abc import Mapping, Sequence
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import AcceptanceRule, Draft, TargetView, Verdict, VerifyRequest
from dovetail.testing.suite import PluginSuite
from numpy.typing import NDArray
from typing import Any, ClassVar

NUM_ROUNDS = 10000
SIGNIFICANCE = 0.001
TEMPERATURES = (1.0, 0.7, 0.2, 1.6)
CELLS = 6
def chi_square_p(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> float: ...

class AcceptanceRuleSuite(PluginSuite):
    kind: ClassVar[str] = 'acceptance_rule'
    plugin: ClassVar[type[AcceptanceRule]]
    options: ClassVar[Mapping[str, Any]] = {}
    num_rounds: ClassVar[int] = NUM_ROUNDS
    def create(self) -> AcceptanceRule: ...
    def drafts(self) -> list[Draft]: ...
    def sampled_requests(self, num_requests: int = 300) -> list[VerifyRequest]: ...

def two_token_counts(
    rule: AcceptanceRule,
    parents: Sequence[int],
    *,
    has_probs: bool,
    num_rounds: int = NUM_ROUNDS,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...
def verify_request(
    draft: Draft,
    target: torch.Tensor,
    random: np.random.Generator,
    sampling: SamplingParams,
) -> VerifyRequest: ...
def request_over(
    draft: Draft,
    target: torch.Tensor,
    sampling: SamplingParams,
    accept_uniforms: NDArray[np.float64],
    recover_uniforms: NDArray[np.float64],
) -> VerifyRequest: ...

class GivenRows(TargetView):
    def __init__(self, rows: torch.Tensor, uniforms: NDArray[np.float64]): ...
    def probs(self) -> torch.Tensor: ...
    def tokens(self) -> list[int]: ...
    def joined(self, views: Sequence[TargetView]) -> torch.Tensor: ...

def greedy() -> SamplingParams: ...
def check_path(draft: Draft, verdict: Verdict) -> None: ...
def uniform_pair_p(one: NDArray[np.float64], other: NDArray[np.float64]) -> float: ...
