"""Drafts of an EAGLE-3 head in the steps of a runner: those of a plain computation, and no change of any token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from support.models.eagle3_folders import WEIGHTS_NAME, ReferenceHead, write_eagle3
from support.models.tiny_models import VOCAB_SIZE, llama, prompts, save
from support.runner.step_loop import GREEDY, StepLoop, poison, request
from support.scheduler.always_drafts import always_drafts
from tidewheel.batch import NO_DRAFT, TO_DRAFT, Launch, SampledTokens, ScheduledBatch, accepted
from tidewheel.config import EngineConfig
from tidewheel.request import Request
from tidewheel.runner import model_runner
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import GraphSizes, prompt_sizes
from tidewheel.sampling import SamplingParams

NUM_TOKENS, NUM_DRAFTS = 24, 4
DRAFTS = {"speculation": "eagle3", "num_speculative_tokens": NUM_DRAFTS}
SAMPLED = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.1)


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    with always_drafts():
        yield


class Models(NamedTuple):
    target: Path
    head: Path
    model: PreTrainedModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("eagle3")
    model = save(partial(llama, num_hidden_layers=8), folder / "target")
    return Models(folder / "target", write_eagle3(folder / "head", model), model)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a target whose next token depends on its last alone, and a head whose first draft is right.

    The head drafts what follows twice the token before the last, if it is among its tokens: later drafts are wrong,
    but where a token follows itself.
    """
    folder = tmp_path_factory.mktemp("followed")
    model = save(partial(llama, num_hidden_layers=8), folder / "target")
    generator = torch.Generator().manual_seed(0)
    follower = torch.randperm(VOCAB_SIZE, generator=generator)
    follower[:40] = torch.arange(40)  # several tokens may have one follower
    weights = load_file(folder / "target" / WEIGHTS_NAME)
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "model.norm.weight":
            tensor.fill_(1.0)
    table = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = _sums(follower, table)
    save_file(weights, folder / "target" / WEIGHTS_NAME, {"format": "pt"})
    model.load_state_dict(weights)
    head = write_eagle3(folder / "head", model, draft_vocab_size=300, strength=0.0) / WEIGHTS_NAME
    tensors = load_file(head)
    hidden = table.shape[1]
    tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, 2 * hidden)), dim=1)
    tensors["norm.weight"].fill_(1.0)
    tensors["lm_head.weight"] = _sums(follower[follower], table)[torch.arange(300) + tensors["d2t"]]
    save_file(tensors, head)
    return Models(folder / "target", head.parent, model)


def _sums(followers: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose largest product with a token's normed embedding is that of the token's follower."""
    return torch.zeros_like(table).index_add_(0, followers, table / table.norm(dim=1, keepdim=True))


def load(models: Models, *, drafts: bool = True, **more: object) -> ModelRunner:
    if drafts:
        more |= {"speculation": "eagle3", "draft_model": str(models.head)}
    config = EngineConfig(
        model=str(models.target), dtype="float32", device="cpu", max_num_seqs=8, num_threads=1,
        **{"num_blocks": 64, "block_size": 16, **more},
    )  # fmt: skip
    return ModelRunner.load(config)


def requests(count: int = 6, sampling: SamplingParams = GREEDY, shared: int = 0) -> list[Request]:
    given = prompts(count, 2, 70)
    given = [np.concatenate((given[0][:shared], prompt)) for prompt in given]
    return [request(f"r{i}", prompt, NUM_TOKENS, sampling, seed=i) for i, prompt in enumerate(given)]


class CheckedRunner:
    """Runner that compares each draft with the reference's, from the tokens that its row has."""

    def __init__(self, models: Models, **settings: object) -> None:
        self._runner, self.num_checked = load(models, **settings), 0
        self.info, self.kv = self._runner.info, self._runner.kv
        self._reference = ReferenceHead(models.head, models.model, (2, 4, 5))
        self._tokens: dict[int, list[int]] = {}
        self.launches: set[Launch] = set()

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        for new in batch.new_rows:
            self._tokens[new.row] = new.token_ids.tolist()
        sampled = self._runner.run(batch)
        self.launches.add(sampled.launch)
        counts = np.ones(len(batch.rows), np.bool_)
        if len(batch.draft_tokens):
            assert sampled.draft_tokens is not None
            for row in np.unique(batch.rows[batch.draft_tokens == TO_DRAFT]).tolist():
                is_draft = (batch.rows == row) & (batch.draft_tokens != NO_DRAFT)
                self._check(row, sampled.draft_tokens[is_draft].tolist())
            counts = accepted(sampled.draft_tokens, sampled.token_ids)
        for row, token in zip(batch.rows[counts].tolist(), sampled.token_ids[counts].tolist(), strict=True):
            if token >= 0:
                self._tokens[row].append(token)
        return sampled

    def _check(self, row: int, drafts: list[int]) -> None:
        found = [draft for draft in drafts if draft >= 0]
        assert found in ([], drafts)
        assert found == self._reference.drafts(self._tokens[row], len(found)), f"row {row}: {self._tokens[row]}"
        self.num_checked += len(found)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 20}], ids=["at once", "bit by bit"])
def test_drafts_are_those_of_a_plain_computation(models: Models, settings: dict[str, int]) -> None:
    runner = CheckedRunner(models, **settings)
    loop = StepLoop(runner, token_budget=runner.info.max_num_batched_tokens, prefix_caching=False, **DRAFTS)  # type: ignore[arg-type]
    loop.run(requests())
    assert runner.num_checked > 40  # how many are drafted depends on how many are right


def test_accepted_drafts_are_computed_again_from_states(models: Models, tmp_path: Path) -> None:
    """A head of four tokens often meets an answer of the same four by chance."""
    head = write_eagle3(tmp_path, models.model, draft_vocab_size=4)
    allowed = load_file(head / WEIGHTS_NAME)["t2d"].nonzero().flatten().tolist()
    runner = CheckedRunner(models._replace(head=head))
    loop = StepLoop(runner, prefix_caching=False, **DRAFTS)  # type: ignore[arg-type]
    loop.run(requests(sampling=SamplingParams(allowed_token_ids=allowed)))
    assert runner.num_checked > 40  # how many are drafted depends on how many are right
    assert loop.scheduler.stats().num_accepted_draft_tokens > 20


def test_drafts_after_accepted_ones_are_right(followed: Models) -> None:
    runner = CheckedRunner(followed)
    loop = StepLoop(runner, prefix_caching=False, **DRAFTS)  # type: ignore[arg-type]
    loop.run(requests())
    assert runner.num_checked > 40  # how many are drafted depends on how many are right
    assert loop.scheduler.stats().num_accepted_draft_tokens > 20


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["models", "followed"])
def test_no_token_changes(request: pytest.FixtureRequest, kind: str, sampling: SamplingParams) -> None:
    models = request.getfixturevalue(kind)
    expected = StepLoop(load(models, drafts=False)).run(requests(sampling=sampling, shared=20))
    runner = load(models)
    poison(runner)
    loop = StepLoop(runner, **DRAFTS)
    assert loop.run(requests(sampling=sampling, shared=20)) == expected
    assert loop.scheduler.stats().num_draft_tokens > 0


def test_no_token_changes_when_blocks_are_short(followed: Models) -> None:
    """Rows are preempted, computed again, and swapped, so that blocks have states of other tokens."""
    expected = StepLoop(load(followed, drafts=False)).run(requests())
    for settings in ({}, {"num_host_blocks": 16, "preemption_mode": "swap"}):
        runner = load(followed, num_blocks=14, **({"swap_space": 0.001} if settings else {}))
        loop = StepLoop(runner, **DRAFTS, **settings)  # type: ignore[arg-type]
        assert loop.run(requests()) == expected
        stats = loop.scheduler.stats()
        assert stats.num_preemptions > 0 and stats.num_accepted_draft_tokens > 0


@pytest.mark.usefixtures("accelerator")
def test_graphs_leave_states_as_well(followed: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = GraphSizes([1, 2, 4, 8, 16, 32], prompt_sizes(64))
    monkeypatch.setattr(model_runner, "graph_sizes", lambda config, parts: sizes)
    runner = CheckedRunner(followed)
    loop = StepLoop(runner, token_budget=64, prefix_caching=False, **DRAFTS)  # type: ignore[arg-type]
    loop.run(requests())
    assert runner.launches == {"graph", "graphs of pieces"}
    assert runner.num_checked > 40  # how many are drafted depends on how many are right
    assert loop.scheduler.stats().num_accepted_draft_tokens > 20
