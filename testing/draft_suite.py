"""Conformance suite of draft workers. A third party's test is a subclass::

    from dovetail.testing import DraftWorkerSuite

    class TestMyDrafter(DraftWorkerSuite):
        plugin = MyDrafter

The statistical checks are deterministic: every random number comes from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail.contracts.draft_stages import ComposesDrafters, DraftStage, StageAbilities
from dovetail.contracts.draft_target import CallsTarget, ReadsTopTokens, RunsTarget, TargetParts, TopTokens
from dovetail.contracts.errors import PluginError
from dovetail.contracts.model import ModelContext
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    BuildsLayers,
    Draft,
    DraftBatch,
    DraftModel,
    DraftRequest,
    DraftSetup,
    DraftWorker,
    KeepsLayers,
    LayerSetup,
    LearnsFromRequests,
    LoadsModel,
    ReadsHiddenLayers,
    ReadsTokenizer,
    SpeculationNeed,
    TreesByOption,
)
from dovetail.nn.context import BuildContext
from dovetail.testing.acceptance_suite import SIGNIFICANCE, uniform_pair_p
from dovetail.testing.draft_pages import SuitePages
from dovetail.testing.draft_rounds import (
    HostBatch,
    Misled,
    RequestStep,
    Talk,
    as_lists,
    assert_same_draft,
    first_path,
    places_in,
    text,
)
from dovetail.testing.draft_stages import ConstantStage
from dovetail.testing.side_effects import leaves_alone
from dovetail.testing.suite import PluginSuite, overrides
from dovetail.testing.target_passes import SuitePasses
from dovetail.worker.speculation.draft_sampling import draft_distributions, draft_draw

MAX_SEQS = 8
"""Requests of the largest batch of draft workers."""
MAX_MODEL_LEN = 256
"""Tokens of the longest request of draft workers."""

DRAWS = 1600
"""Drafts per check that nodes are drawn as reported, over `CELLS` times `CELLS` cells for each pair of nodes (35
degrees of freedom). A fault that moves a share d of probability between two halves of the cells has noncentrality
1600 * (2 d)**2: from d = 0.11 on it is found at `SIGNIFICANCE` with a power of 0.99."""


def _held_by_no_rank(*_: object) -> Any:
    raise PluginError("several ranks share the target's embedding, and drafters run on one")


class DraftWorkerSuite(PluginSuite):
    """Tests of every draft worker."""

    kind: ClassVar[str] = "draft_worker"
    plugin: ClassVar[type[DraftWorker]]
    options: ClassVar[Mapping[str, Any]] = {}
    vocab_size: ClassVar[int] = 50
    hidden_size: ClassVar[int] = 8
    num_tokens: ClassVar[int] = 4
    num_layers: ClassVar[int] = 4
    """Number of the target's layers, for drafters that read states between them."""
    num_draws: ClassVar[int] = DRAWS
    """Drafts per check of what they are drawn from; see `DRAWS`."""
    _passes: tuple[SuitePasses, ...] = ()
    """Those of every worker of a test."""
    _num_known: Mapping[int, int] = {}
    """By seq_id, known tokens of the latest batch."""

    def setup(self) -> DraftSetup:
        """A setup with a random target's embeddings."""
        torch.manual_seed(0)
        simple = DraftSetup(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQS,
            num_tokens=self.num_tokens,
            device=torch.device("cpu"),
            dtype=torch.float32,
            embed=torch.nn.Embedding(self.vocab_size, self.hidden_size).requires_grad_(False),
            compute_logits=torch.nn.Linear(self.hidden_size, self.vocab_size, bias=False).requires_grad_(False),
            num_layers=self.num_layers,
            distributions=draft_distributions,
            draw=draft_draw,
            wants_confidence=self.plugin.capabilities.confidence,
            tokenizer_json=self.tokenizer_json() if issubclass(self.plugin, ReadsTokenizer) else None,
            target=self._create_passes(),
            stages=self.stages(),
        )
        if not issubclass(self.plugin, BuildsLayers | LoadsModel | KeepsLayers):
            return simple
        return LayerSetup(
            **vars(simple), create_context=self.create_context, pages=SuitePages(), model=self.own_model()
        )

    def tokenizer_json(self) -> str:
        """The target's tokenizer, for a `ReadsTokenizer`: token 7 is written 7, and blanks stand between tokens.
        Override it for texts of your own."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokenizer: Any = Tokenizer(models.WordLevel({str(i): i for i in range(self.vocab_size)}, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return tokenizer.to_str()

    def _create_passes(self) -> SuitePasses | None:
        if not issubclass(self.plugin, RunsTarget):
            return None
        passes = SuitePasses(self.vocab_size, self.hidden_size, self.num_layers)
        passes.begin(self._num_known)
        self._passes = (*self._passes, passes)
        return passes

    def stages(self) -> Mapping[str, DraftStage]:
        """What a `ComposesDrafters` is handed: stages that guess the same token again and again, each its own."""
        if not issubclass(self.plugin, ComposesDrafters):
            return {}
        labels = self.plugin.stages(self._options())
        sure = self.plugin.capabilities.confidence
        return {label: ConstantStage(label, index, self.num_tokens, sure) for index, label in enumerate(labels, 1)}

    def own_model(self) -> DraftModel | None:
        """The model that the host would load for a `LoadsModel`; override it for one, and `need` with a
        `SpeculationNeed.model` that describes it."""
        return None

    def create_context(self) -> ModelContext:
        """As `LayerSetup.create_context`."""
        return BuildContext(torch.float32, torch.device("cpu"), max_model_len=MAX_MODEL_LEN, kv_dtype="float32")

    def create(self) -> DraftWorker:
        """Returns a new worker."""
        return self._create(self.setup())

    def _create(self, setup: DraftSetup) -> DraftWorker:
        return self.plugin(self._options(), setup)

    def _options(self) -> PluginOptions:
        return self.plugin.Options.model_validate(dict(self.options))

    def need(self) -> SpeculationNeed:
        """What the suite asks of the drafter."""
        return SpeculationNeed(
            device_type="cpu",
            dtype="float32",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            tensor_parallel=1,
            num_tokens=self.num_tokens,
            num_layers=self.num_layers,
            kv_dtype="float32",
            gives_hidden_layers=True,
            has_tokenizer_json=issubclass(self.plugin, ReadsTokenizer),
            stages={
                name: StageAbilities(stage.capabilities, stage.num_tokens) for name, stage in self.stages().items()
            },
        )

    def batch(
        self,
        num_requests: int,
        max_drafts: int | None = None,
        num_known: int = 40,
        first: int = 0,
        end: int | None = None,
        known: NDArray[np.int32] | None = None,
    ) -> DraftBatch:
        """Requests whose tokens repeat themselves, `num_known` of them known, or those of `known`. The step has
        computed the positions from `first` to `end` (without it: all but the last known token), each of which has the
        same states in any batch."""
        steps = []
        for seq_id in range(num_requests):
            phrase = np.random.default_rng(seq_id).integers(0, self.vocab_size, 7, dtype=np.int32)
            if overrides(type(self), DraftWorkerSuite, "text"):
                phrase = np.array(self.text(7, seq_id)[:119], dtype=np.int32)  # whole periods
            text = np.resize(phrase, num_known + 20)
            tokens, last = text[:num_known] if known is None else known, num_known - 1 if end is None else end
            count = self.num_tokens if max_drafts is None else max_drafts
            prediction = text[max(1, len(tokens) - 5) :].tolist()
            steps.append(RequestStep(seq_id, tokens.tolist(), first, last, count, prediction=prediction))
        return self.batch_of(steps).batch

    def batch_of(self, steps: Sequence[RequestStep]) -> HostBatch:
        """Returns a batch in new arrays."""
        requests: list[DraftRequest] = []
        states: list[torch.Tensor] = []
        longest = max((step.end for step in steps), default=0)
        shape, num_rows = (max(128, longest), self.num_layers + 1, self.hidden_size), 0
        for step in steps:
            tokens = np.array(step.token_ids, dtype=np.int32)
            count = step.end - step.first
            view = tokens[:]
            view.flags.writeable = False
            requests.append(
                DraftRequest(
                    seq_id=step.seq_id,
                    token_ids=view,
                    num_prompt_tokens=step.num_prompt_tokens or max(1, len(tokens) - 5),
                    max_drafts=step.max_drafts,
                    sampling=step.sampling(),
                    hidden_rows=np.arange(num_rows, num_rows + count),
                    uniforms=step.stream(),
                    first_position=step.first,
                    forced=tuple(step.forced[: step.max_drafts]),
                    top_tokens=self._top_tokens(step),
                    prediction=step.predicted() if self.plugin.capabilities.reads_prediction else None,
                )
            )
            num_rows += count
            # numpy's rows do not depend on how many are drawn, torch's do.
            drawn = np.random.default_rng(step.chosen_seed).standard_normal(shape, np.float32)
            states.append(torch.from_numpy(drawn)[step.first : step.end])
        self._num_known = {step.seq_id: len(step.token_ids) for step in steps}
        for passes in self._passes:
            passes.begin(self._num_known)
        whole = torch.cat(states)
        plugin = self.plugin
        layers = plugin.hidden_layers(self._options(), self.need()) if issubclass(plugin, ReadsHiddenLayers) else ()
        batch = DraftBatch(
            requests,
            whole[:, -1].contiguous() if self.plugin.capabilities.needs_hidden_states else None,
            whole[:, list(layers)].flatten(1) if layers else None,
        )
        return HostBatch(batch)

    def _top_tokens(self, step: RequestStep) -> TopTokens | None:
        plugin = self.plugin
        if not issubclass(plugin, ReadsTopTokens) or step.end < len(step.token_ids) - 1:
            return None
        return step.top_tokens(self.vocab_size, plugin.num_top_tokens(self._options()))

    def test_answers_every_request_with_a_well_formed_draft(self) -> None:
        """One answer per request; token ids, parents and probabilities as the capabilities promise."""
        batch = self.batch(3)
        drafts = self.create().propose(batch)
        assert len(drafts) == 3
        for draft in drafts:
            self.check(draft, self.num_tokens)
        self._require_drafts(drafts, "requests whose texts repeat themselves")

    def test_guesses_something(self) -> None:
        """For some request in some round: texts that repeat themselves or do not, with a prediction (where it reads
        one) or tokens that a grammar forces. All that the suite says of drafts, it says of those that it sees."""
        talks = [Talk(seq_id, tokens, 30) for seq_id, tokens in enumerate((self.text(7), self.text(), self._few(6)))]
        drafts = self._guesses(talks, forced=self.text()[:2])
        hint = "so no test looks at a draft of its: override `text` with texts that it continues"
        self._require_drafts(drafts, f"any of the suite's texts, {hint}")

    def _few(self, seed: int) -> list[int]:
        """A text in which most tokens were followed by several others before."""
        random = np.random.default_rng(seed)
        return [int(token) for token in random.integers(0, min(4, self.vocab_size), 120)]

    def _guesses(self, talks: Sequence[Talk], forced: Sequence[int] = ()) -> list[Draft]:
        """Six rounds: the drafts that are not empty. Of the last request, tokens may be forced."""
        worker, drafts = self.create(), []
        for _ in range(6):
            for talk in talks:
                talk.advance(worker)
            steps = [talk.step(self.num_tokens) for talk in talks]
            steps[-1] = replace(steps[-1], forced=forced)
            for talk, draft in zip(talks, worker.propose(self.batch_of(steps).batch), strict=True):
                self.check(draft, self.num_tokens)
                talk.take(draft)
                drafts += [draft] if draft is not None and len(draft.token_ids) else []
        return drafts

    def _require_drafts(self, drafts: Sequence[Draft | None], of: str) -> None:
        """Skips the test, by name, where there is no draft to look at."""
        if not any(draft is not None and len(draft.token_ids) for draft in drafts):
            pytest.skip(f"{self.plugin.__name__} guesses nothing for {of}")

    def test_drafts_over_as_many_ranks_as_it_declares(self) -> None:
        """Over several ranks none holds the target's whole embedding and output layer but for drafters that name them
        (`CallsTarget`); a drafter that calls what it did not name gets an error."""
        self.require(tensor_parallel=2)
        need = replace(self.need(), tensor_parallel=2)
        environment = Environment("cpu", num_cpus=2, memory_bytes=2**34)
        if reasons := reasons_against(self.plugin, need, self._options(), environment):
            pytest.skip(" ".join(reasons))
        setup = self.setup()
        parts = (
            self.plugin.target_parts(self._options(), need) if issubclass(self.plugin, CallsTarget) else TargetParts()
        )
        embed = setup.embed if parts.embedding else _held_by_no_rank
        compute_logits = setup.compute_logits if parts.output else _held_by_no_rank
        setup = replace(setup, embed=embed, compute_logits=compute_logits)
        for draft in self._create(setup).propose(self.batch(3)):
            self.check(draft, self.num_tokens)

    def test_keeps_to_max_drafts(self) -> None:
        """A request near its end gets no more nodes than it can use."""
        for count in (0, 1, 2):
            drafts = self.create().propose(self.batch(2, max_drafts=count))
            for draft in drafts:
                self.check(draft, count)
        self._require_drafts(drafts, "requests whose texts repeat themselves")

    def test_serves_short_requests(self) -> None:
        """The shortest prompt is one token; what follows it is known as well when guesses are wanted."""
        for num_known in (2, 3, 6):
            for draft in self.create().propose(self.batch(2, num_known=num_known)):
                self.check(draft, self.num_tokens)

    def test_serves_as_many_requests_as_run_at_a_time(self) -> None:
        """A batch of `max_num_seqs`."""
        drafts = self.create().propose(self.batch(MAX_SEQS))
        assert len(drafts) == MAX_SEQS
        for draft in drafts:
            self.check(draft, self.num_tokens)

    def test_serves_requests_up_to_max_model_len(self) -> None:
        """All drafts where they fit just so, and one where no more does."""
        for count in (self.num_tokens, 1):
            # One token comes after the drafts.
            for draft in self.create().propose(self.batch(2, count, num_known=MAX_MODEL_LEN - count - 1)):
                self.check(draft, count)

    def test_leaves_alone_what_is_not_its_own(self) -> None:
        """It does not change the batch, which the host and other drafters read, or the random generators of the
        process."""
        worker, batch = self.create(), self.batch(3)
        with leaves_alone(batch):
            worker.propose(batch)

    def test_repeats_itself(self) -> None:
        """The same requests with the same uniforms give the same drafts."""
        workers = [self.create() for _ in range(2)]
        first, second = (worker.propose(self.batch(3)) for worker in workers)
        assert [as_lists(draft) for draft in first] == [as_lists(draft) for draft in second]

    def test_gives_a_request_the_same_draft_in_any_batch(self) -> None:
        """Other requests in the batch do not change the draft."""
        together = self.create().propose(self.batch(3))
        for seq_id in range(3):
            request = self.batch(3).requests[seq_id]
            known, prediction = request.token_ids.tolist(), request.prediction
            step = RequestStep(
                *(seq_id, known, 0, len(known) - 1, self.num_tokens),
                prediction=None if prediction is None else prediction.tolist(),
            )
            assert_same_draft(together[seq_id], self.create().propose(self.batch_of([step]).batch)[0])

    def test_requests_that_run_side_by_side_do_not_meet(self) -> None:
        """Rounds of three requests that share text, with verdicts of every kind; some batches leave out some requests:
        each gets the drafts that it gets alone. What a batch held is overwritten before the next call."""
        together = self._converse(range(3))
        for seq_id in range(3):
            alone = self._converse([seq_id], overwrites=False)[seq_id]
            for round_id, (draft, expected) in enumerate(zip(together[seq_id], alone, strict=True)):
                assert draft == expected, f"request {seq_id} in its round {round_id}"

    def _converse(self, seq_ids: Sequence[int], overwrites: bool = True) -> dict[int, list[Any]]:
        """Drafts of each request, round by round: the second writes what the first has written, the third its own."""
        worker = self.create()
        talks = {
            seq_id: Talk(seq_id, self.text(7 if seq_id == 2 else None, seed=seq_id // 2), 30 - 8 * seq_id)
            for seq_id in seq_ids
        }
        for present in ((0, 1, 2), (0, 2), (0, 1, 2), (1,), (0, 1, 2), (2, 1, 0)):
            rows = [talks[seq_id] for seq_id in present if seq_id in talks]
            if not rows:
                continue
            for talk in rows:
                talk.advance(worker)
            host = self.batch_of([talk.step(self.num_tokens) for talk in rows])
            for talk, draft in zip(rows, worker.propose(host.batch), strict=True):
                self.check(draft, self.num_tokens)
                talk.take(draft)
            if overwrites:
                host.overwrite()
        return {seq_id: talk.drafts for seq_id, talk in talks.items()}

    def text(self, period: int | None = None, seed: int = 0) -> list[int]:
        """120 tokens: those of every `period` again and again, or without repetition as far as possible. What the
        suite's requests say is made of them: override it for a drafter that continues particular texts only."""
        return text(self.vocab_size, period, seed)

    @pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
    def test_drafts_follow_from_the_call_alone(self, is_right: bool) -> None:
        """Those of a drafter that is `stateless`: after calls whose guesses were all right, or all wrong, and after the
        end of requests, it guesses what a new one guesses in the same call. For the host leaves out calls."""
        if not self.plugin.capabilities.stateless:
            pytest.skip(f"{self.plugin.__name__} does not declare stateless")
        worker = self.create()
        texts = (self.text(7), self.text(), self.text(7, 1))
        requests = [Misled(seq_id, tokens, is_right, self.vocab_size) for seq_id, tokens in enumerate(texts)]
        for round_id in range(11):
            if round_id == 10:
                for request in requests:
                    worker.on_finished(request.seq_id, request.token_ids)
                requests = [Misled(seq_id, tokens, is_right, self.vocab_size) for seq_id, tokens in enumerate(texts, 3)]
            steps = [request.step(self.num_tokens) for request in requests]
            drafts = worker.propose(self.batch_of(steps).batch)
            expected = self.create().propose(self.batch_of(steps).batch)
            for request, draft, other in zip(requests, drafts, expected, strict=True):
                assert_same_draft(
                    draft, other, f"request {request.seq_id} after {round_id} calls: `stateless` is declared"
                )
                request.advance(worker, draft)

    def test_guesses_from_predictions(self) -> None:
        """Some draft differs from what the drafter guesses without a prediction, of outputs that are as predicted, 1 to
        20 tokens long."""
        self.require("reads_prediction")
        steps: list[RequestStep] = []
        for tokens in (self.text(), self.text(7)):
            for num_output in (1, 6, 20):
                prompt = 40 - num_output
                step = RequestStep(
                    len(steps), tokens[:40], 0, 39, self.num_tokens, prompt, prediction=tokens[prompt:80]
                )
                steps.append(step)
        without = [replace(step, prediction=None) for step in steps]
        drafts, others = (
            [as_lists(draft) for draft in self.create().propose(self.batch_of(each).batch)] for each in (steps, without)
        )
        assert drafts != others, "`reads_prediction` is declared, and predictions change no draft"

    def test_takes_in_prompts_that_are_not_complete(self) -> None:
        """Steps that compute part of a prompt, after which nothing is to be guessed, and then the rest."""
        if self.plugin.capabilities.stateless:
            pytest.skip(f"{self.plugin.__name__} is stateless: it is asked for drafts only")
        worker, tokens = self.create(), self.text(7)[:40]
        for first, end in ((0, 11), (11, 30)):
            steps = [RequestStep(seq_id, tokens, first, end, 0, num_prompt_tokens=40) for seq_id in range(2)]
            for draft in worker.propose(self.batch_of(steps).batch):
                self.check(draft, 0)
        tokens.append(3)
        steps = [RequestStep(seq_id, tokens, 30, 40, self.num_tokens, num_prompt_tokens=40) for seq_id in range(2)]
        for draft in worker.propose(self.batch_of(steps).batch):
            self.check(draft, self.num_tokens)

    def test_a_key_may_come_again(self) -> None:
        """Once its request ended, it names another one, which is new: it drafts as it would under any other seq_id."""
        for tokens in (self.text()[:20], self.text(7)[:30]):
            drafts = []
            for seq_id in (0, 6):
                step = RequestStep(seq_id, tokens, 0, len(tokens) - 1, self.num_tokens, seed=0, is_sampled=True)
                drafts.append(self._taught().propose(self.batch_of([step]).batch)[0])
            assert_same_draft(drafts[0], drafts[1])

    def _taught(self) -> DraftWorker:
        """A worker that has seen a request to its end, under seq_id 0, and another that goes on."""
        worker = self.create()
        steps = [RequestStep(seq_id, self.text(seed=seq_id)[:60], 0, 59, self.num_tokens) for seq_id in range(2)]
        worker.propose(self.batch_of(steps).batch)
        worker.on_finished(0, self.text()[:60])
        return worker

    def test_goes_on_after_verification_and_finish(self) -> None:
        """A round, its outcome (no node or the whole path is accepted), another round, the end, and the tokens
        again."""
        for is_accepted in (False, True):
            worker = self.create()
            batch = self.batch(2)
            for draft, request in zip(worker.propose(batch), batch.requests, strict=True):
                if draft is not None and len(draft.token_ids):
                    worker.on_verified(request.seq_id, first_path(draft) if is_accepted else [], len(draft.token_ids))
            worker.propose(batch)
            for request in batch.requests:
                worker.on_finished(request.seq_id, request.token_ids.tolist())
            assert len(worker.propose(batch)) == 2

    def test_forgets_finished_requests(self) -> None:
        """What a request taught it is gone (one that is no `LearnsFromRequests` learns nothing), so that it drafts like
        a new one, of texts that repeat themselves and of those that only a finished request could continue."""
        worker = self._taught()
        worker.on_finished(1, self.text(seed=1)[:60])
        if isinstance(worker, LearnsFromRequests):
            worker.forget_finished()
        fresh = self.create()
        texts = [self.text(7)[:40], self.text()[:20]]
        steps = [
            RequestStep(seq_id, tokens, 0, len(tokens) - 1, self.num_tokens) for seq_id, tokens in enumerate(texts)
        ]
        drafts, expected = (each.propose(self.batch_of(steps).batch) for each in (worker, fresh))
        assert [as_lists(draft) for draft in drafts] == [as_lists(draft) for draft in expected]

    def test_drafts_are_drawn_from_the_distributions_that_come_with_them(self) -> None:
        """Each node with a uniform of its own. By a chi-square test; `DRAWS` says what it finds. One that
        declares `probabilities` and never gives a distribution fails."""
        self.require("probabilities")
        self._require_distributions()
        places = self.drawn_places(self.num_draws)
        for one in range(places.shape[1]):
            for other in range(one):
                p_value = uniform_pair_p(places[:, other], places[:, one])
                assert p_value > SIGNIFICANCE, f"nodes {other} and {one}: p = {p_value:.2g}"

    def _require_distributions(self) -> None:
        """Of sampled requests, whose texts repeat themselves or do not."""
        texts = [text[:20] for seed in range(4) for text in (self.text(7, seed), self.text(seed=seed))]
        steps = [
            RequestStep(seq_id, tokens, 0, 19, self.num_tokens, is_sampled=True) for seq_id, tokens in enumerate(texts)
        ]
        proposed = self.create().propose(self.batch_of(steps).batch)
        drafts = [draft for draft in proposed if draft is not None and len(draft.token_ids)]
        if any(draft.probs is not None for draft in drafts):
            return
        if not drafts or self._proposes_trees_by_option():
            pytest.skip(f"{self.plugin.__name__} draws no drafts of the suite's texts")
        pytest.fail("`probabilities` is declared, and no draft of sampled requests has `probs`")

    def _proposes_trees_by_option(self) -> bool | None:
        """None where options do not decide."""
        plugin = self.plugin
        return plugin.proposes_trees(self._options()) if issubclass(plugin, TreesByOption) else None

    def test_proposes_trees_where_it_declares_them(self) -> None:
        """Some draft is a tree, of requests in which most tokens were followed by several others before. Where options
        decide (`TreesByOption`), those that propose trees."""
        self.require("trees")
        if self._proposes_trees_by_option() is False:
            pytest.skip(f"{self.plugin.__name__} proposes no trees with these options")
        talks = [Talk(seq_id, self._few(seq_id), 60) for seq_id in range(4)]
        drafts = [draft for draft in self._guesses(talks) if len(draft.token_ids) > 1]
        if not drafts:
            pytest.skip(f"{self.plugin.__name__} guesses no two tokens of the suite's texts")
        assert any(draft.is_tree for draft in drafts), "`trees` is declared, and every draft is a chain"

    def drawn_places(self, num_draws: int, num_nodes: int = 3) -> NDArray[np.float64]:
        """[num_draws, num_nodes]: where each of a request's first drafts lies in its distribution, likely tokens first,
        as a number that is uniform in [0, 1) if it was drawn from it; NaN where there was no such node."""
        worker, tokens = self.create(), self.text(7)[:20]
        random = np.random.default_rng(5)
        places = np.full((num_draws, min(num_nodes, self.num_tokens)), np.nan)
        for start in range(0, num_draws, MAX_SEQS):
            steps = [
                RequestStep(seq_id, tokens, 0, 19, self.num_tokens, seed=0, is_sampled=True, uniforms=uniforms)
                for seq_id, uniforms in enumerate(random.random((MAX_SEQS, self.num_tokens)))
            ]
            for row, draft in enumerate(worker.propose(self.batch_of(steps).batch), start):
                if draft is None or row >= num_draws:
                    continue
                count = min(len(draft.token_ids), places.shape[1])
                probs = torch.eye(self.vocab_size)[list(draft.token_ids)] if draft.probs is None else draft.probs
                places[row, :count] = places_in(probs[:count].double().numpy(), draft.token_ids[:count], random)
        return places

    def test_hears_of_the_end_of_a_request_that_it_never_saw(self) -> None:
        """A request may end before its first proposal, and changes nothing for the others."""
        worker = self.create()
        worker.on_finished(99, [1, 2])
        assert as_lists(worker.propose(self.batch(1))[0]) == as_lists(self.create().propose(self.batch(1))[0])

    def check(self, draft: Draft | None, max_drafts: int) -> None:
        """Asserts that a draft is one that the runner can use."""
        if draft is None:
            return
        count = len(draft.token_ids)
        assert count <= max_drafts, f"{count} drafts where {max_drafts} are used"
        assert all(0 <= token < self.vocab_size for token in draft.token_ids), "token id outside the vocabulary"
        if draft.parents is not None:
            assert len(draft.parents) == count
            assert all(-1 <= parent < i for i, parent in enumerate(draft.parents)), "parents come before children"
        assert self.plugin.capabilities.trees or not draft.is_tree, "a tree, but `trees` is not declared"
        declares = self.plugin.capabilities
        if draft.confidence is not None:
            assert declares.confidence, "confidence, but `confidence` is not declared"
            assert len(draft.confidence) == count
            assert all(0 <= confidence <= 1 for confidence in draft.confidence)
        if draft.probs is None:
            assert draft.confidence is not None or not declares.confidence, "`confidence` is declared, but not given"
            return
        assert declares.probabilities, "probs, but `probabilities` is not declared"
        assert draft.probs.shape == (count, self.vocab_size)
        assert draft.probs.dtype == torch.float32
        assert bool((draft.probs >= 0).all())
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(count))
        chosen = draft.probs.gather(1, torch.as_tensor(draft.token_ids, dtype=torch.int64)[:, None])
        assert bool((chosen > 0).all()), "a draft that its own distribution cannot give"
