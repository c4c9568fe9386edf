import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch

from tidewheel.batch import Launch, SampledTokens, ScheduledBatch, WeightVariant
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import DTYPES, NativeModel, Progress, no_progress
from tidewheel.models.lora_folder import LoraFile, LoraWeights, read_lora
from tidewheel.models.model_folder import one_line
from tidewheel.models.shard import Shard
from tidewheel.models.trial_prompt import TOLERANCE, relative_difference
from tidewheel.runner.accelerator import CudaAccelerator, accelerator_of
from tidewheel.runner.drafter import Drafter
from tidewheel.runner.host_memory import MemoryClaim
from tidewheel.runner.host_tier import BlockTransfers
from tidewheel.runner.inputs import (
    DeviceArrays,
    ForwardBounds,
    Group,
    Groups,
    HostInputs,
    InputSender,
    RowTable,
    StagingSender,
    StepInputs,
    share_memory,
)
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import RunnerParts, StageClock, allocate_cache, graph_sizes, load_parts
from tidewheel.runner.sampler import PendingStep, SamplerOutput, pool_states, sample_part, score_prompts
from tidewheel.runner.sampling_plan import SamplingPlan, SamplingTable
from tidewheel.runner.step_graphs import DecodeGraph, GraphSizes, LoraStacks, StepGraphs, StepModel
from tidewheel.runner.thread_count import StepThreads
from tidewheel.runner.warm_up import (
    MEASURED_S,
    StepSize,
    demanding_batch,
    estimated_activation_bytes,
    estimated_graph_bytes,
    graph_trial,
    largest_step,
    measure_decodes,
    measured_activation_bytes,
    warm_up,
)

logger = logging.getLogger(__name__)

NUM_TRIAL_GRAPHS = 3
# Bytes of the static input buffer; the spare is for new rows.
BYTES_PER_TOKEN = 24
BYTES_PER_ROW = 96
SPARE_BYTES = 1 << 20


class ModelRunner:
    """Runner of scheduled batches on one thread. Without an accelerator (CPU), `launch` returns a finished step."""

    def __init__(self, parts: RunnerParts, cache: BlockTransfers, accelerator: CudaAccelerator | None = None) -> None:
        self.info = info = parts.info
        self._shard = parts.shard
        self.kv = cache.kv
        self._transfers = cache
        self._accelerator = accelerator
        self._rows = RowTable(
            info.max_num_seqs, info.max_model_len, info.block_size, parts.device, shares_memory=accelerator is None
        )
        self._sampling = SamplingTable(info.max_num_seqs, info.vocab_size, accelerator, self._shard.num_ranks)
        self._sender: InputSender = share_memory
        self._lora = LoraStacks.of(parts.model)
        if accelerator is not None:
            num_bytes = BYTES_PER_TOKEN * info.max_num_batched_tokens + BYTES_PER_ROW * info.max_num_seqs
            num_bytes += 0 if self._lora is None else self._lora.num_bytes(info.max_num_batched_tokens)
            self._sender = StagingSender(accelerator, num_bytes + SPARE_BYTES)
        draft = parts.draft
        self._drafter = None if draft is None else Drafter(draft, self._rows, self._sender, info, cache.kv)
        self._steps = StepModel(parts.model, self._rows, cache.kv.layers, parts.encoder, self._shard)
        self._variants: tuple[WeightVariant, ...] = ("full", "quantized") if info.copy_bytes else ("full",)
        self._weights: WeightVariant = "full"
        self._graphs_of: dict[tuple[WeightVariant, bool], StepGraphs] = {}  # whether rows have adapters
        self._claim: MemoryClaim | None = None  # ends with the runner
        self._threads: StepThreads | None = None  # if there are several

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None, shard: Shard | None = None) -> Self:
        """Load the model, or a rank's part, size the cache, capture graphs. Raise `ConfigError`."""
        progress = progress or no_progress
        report = StageClock(progress)
        parts = load_parts(config, report, shard)
        accelerator, sizes = accelerator_of(parts.device), graph_sizes(config, parts)
        report("profile", 0.0)
        if accelerator is not None and sizes.decodes and not parts.model.is_capturable:
            sizes = cls._tried(parts, accelerator, sizes)
        cache, info = allocate_cache(parts, config, *cls._measured(parts, accelerator, sizes))
        report("profile", 1.0)
        runner = cls(parts._replace(info=info), cache, accelerator)
        if accelerator is not None:
            warm_up(info, runner.run_with_each, report, drafts=runner._drafter is not None)
        graph_bytes = sum(map(sum, runner.capture(sizes, report)))
        limit_s = MEASURED_S if parts.shard.num_ranks == 1 else None  # ranks run the same steps
        decode_seconds = [] if config.speculation == "none" else measure_decodes(info, runner.run, limit_s)
        seconds = report.seconds()
        if parts.compile_log is not None:
            parts.compile_log.begin_serving(progress)
        runner.info = msgspec.structs.replace(
            info, graph_bytes=graph_bytes, load_seconds=sum(seconds.values()), stage_seconds=seconds,
            decode_seconds=decode_seconds,
        )  # fmt: skip
        runner._claim = parts.claim
        if accelerator is None and torch.get_num_threads() > 1:
            runner._threads = StepThreads(torch.get_num_threads(), is_fixed=config.num_threads is not None)
        return runner

    @classmethod
    def _tried(cls, parts: RunnerParts, accelerator: CudaAccelerator, sizes: GraphSizes) -> GraphSizes:
        trial, name = graph_trial(parts.info), parts.info.architecture
        objection = "max_model_len or max_num_batched_tokens is too small for a trial"
        if trial is not None:
            cache = BlockTransfers(KVTensors(parts.layout, len(trial[0].block_ids), parts.device))
            objection = cls(parts, cache, accelerator)._objection_to_graphs(accelerator, *trial)
        if objection:
            logger.info("CUDA graphs: none of %s: %s", name, objection)
            return GraphSizes()
        logger.info("CUDA graphs: of decodes, as %s computed the same in a trial", name)
        return sizes

    @torch.inference_mode()
    def _objection_to_graphs(
        self, accelerator: CudaAccelerator, prompts: ScheduledBatch, decodes: Sequence[ScheduledBatch]
    ) -> str:
        try:
            self.run(prompts)
            forward = self._eager_forward(decodes[0])
            forward()
            with accelerator.no_waiting():  # a wait would fail a capture
                forward()
            self.capture(GraphSizes([len(prompts.rows)]), no_progress)
            differences = [relative_difference(*self.logits_of_both(decode)) for decode in decodes]
        except (torch.OutOfMemoryError, ConfigError):
            raise
        except Exception as error:  # layers may raise anything
            return f"no graph can hold a step: {one_line(error)}"
        limit = TOLERANCE[DTYPES[self.info.dtype]]
        if all(difference <= limit for difference in differences):  # NaN fails too
            return ""
        return f"a replay changes its logits by {max(differences):.2g}, at most {limit} is right"

    @classmethod
    def _measured(cls, parts: RunnerParts, accelerator: CudaAccelerator | None, sizes: GraphSizes) -> tuple[int, int]:
        """Return the bytes of the largest step, with a minimal cache, and of graphs; estimates on a CPU."""
        layout, device = parts.layout, parts.device
        largest = largest_step(parts.info)

        def run(size: StepSize) -> ModelRunner:
            cache = BlockTransfers(KVTensors(layout, -(-size.tokens_per_row // layout.block_size), device))
            runner = cls(parts, cache, accelerator)
            runner.run(runner.with_adapters(demanding_batch(size, layout.block_size)))
            return runner

        estimated = partial(estimated_activation_bytes, largest, dtype=DTYPES[parts.info.dtype])
        of_drafts = 0 if parts.draft is None else estimated(parts.draft.shape)
        if accelerator is None:
            run(StepSize(1, min(2, parts.info.max_model_len)))
            return max(estimated(layout.shape), of_drafts), 0
        runner, activation_bytes = measured_activation_bytes(run, largest, device, parts.shard.num_ranks)
        taken = runner.capture(GraphSizes(*(part[-NUM_TRIAL_GRAPHS:] for part in sizes)), no_progress)
        counts = [len(runner._graphs_of) * len(part) for part in sizes]
        graph_bytes = sum(estimated_graph_bytes(*pair) for pair in zip(taken, counts, strict=True))
        return max(activation_bytes, of_drafts), graph_bytes

    def capture(self, sizes: GraphSizes, progress: Progress) -> GraphSizes:
        """Return the bytes of each graph, the largest first. Raise `ConfigError`."""
        if not sizes.decodes or self._accelerator is None:
            return GraphSizes()
        pool, taken = self._accelerator.graph_pool(), []
        try:
            for weights, lora in itertools.product(self._variants[::-1], dict.fromkeys((self._lora, None))):
                self._use(weights)
                graphs = StepGraphs(pool, self._steps, self._sender, self.info.max_model_len, lora=lora)
                with torch.inference_mode():
                    taken.append(graphs.capture(sizes, progress))
                self._graphs_of[weights, lora is not None] = graphs
            parts = zip(*taken, strict=True)  # each by variant
            return GraphSizes(*(list(itertools.chain(*part)) for part in parts))
        except torch.OutOfMemoryError:
            raise ConfigError(
                "the GPU has no room for CUDA graphs beside weights and cache: lower gpu_memory_utilization, "
                "kv_cache_memory_mb, num_blocks or max_num_seqs, or set enforce_eager"
            ) from None

    def _graphs(self, batch: ScheduledBatch) -> StepGraphs | None:
        return self._graphs_of.get((self._weights, len(batch.lora_slots) > 0))

    def _use(self, weights: WeightVariant) -> None:
        if weights != self._weights:
            model = self._steps.model
            assert isinstance(model, NativeModel), "only native models have a quantised copy"
            model.use(weights)
            self._weights = weights

    def run_with_each(self, batch: ScheduledBatch) -> None:
        for weights in self._variants:
            self.run(dataclasses.replace(batch, weights=weights))
        if self._lora is not None:
            self.run(self.with_adapters(batch))

    def read_lora(self, folder: Path) -> LoraWeights:
        """Read an adapter, on any thread and beside steps. Raise `ConfigError`."""
        assert self._lora is not None
        return read_lora(folder, self._lora.model, self._lora.max_rank)

    def check_lora(self, folder: Path) -> None:
        """Check the files of an adapter without reading its values. Raise `ConfigError`."""
        assert self._lora is not None
        LoraFile(folder, self._lora.model, self._lora.max_rank)

    def with_adapters(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return a batch in which every row has an adapter, if there are slots."""
        if self._lora is None:
            return batch
        return dataclasses.replace(batch, lora_slots=np.zeros(len(batch.rows), np.int32))

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step without waiting; the device runs steps in order."""
        if self._threads is not None:
            self._threads.adapt(batch.num_tokens + sum(new.request.encoder_tokens for new in batch.new_rows))
        try:
            self._use(batch.weights)
            with torch.inference_mode():
                self.prepare(batch)
                if self._steps.encoder is not None:
                    self._steps.encoder.update(batch)
                pending = self._launch(batch)
            if self._accelerator is None:
                pending.wait()
            return pending
        finally:
            if self._threads is not None:
                self._threads.own.end_step()

    def prepare(self, batch: ScheduledBatch) -> None:
        """Start block copies and take in new requests. Raise `RowError` for one whose parameters do not fit."""
        self._transfers.start(batch)
        if self._lora is not None:
            self._lora.load(batch.lora_loads)
        self._sampling.update(batch)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        changes, drafts = self._rows.update(batch), None
        host = self._rows.host_inputs(batch)
        if self._drafter is not None:
            drafts, changes = self._drafter.begin(batch, host, changes)
        plan = self._sampling.plan(batch, host)
        graphs = self._graphs(batch) if plan.scoring is None and plan.pooling is None else None
        graph = None if graphs is None else graphs.find_decodes(batch)
        launch: Launch = "graph"
        if graph is not None:
            sampled = self._replayed(batch, host, plan, changes, graph)
        else:
            sampled, launch = self._computed(batch, host, plan, changes, graphs)
        if self._drafter is not None:
            self._drafter.read_prompts(batch)
        pending = PendingStep(batch, plan, sampled, self._accelerator, launch, drafts)
        if plan.masks is not None:
            self._sampling.grammars.sampled(plan.masks, batch, pending.wait)
        return pending

    def logits_of_both(self, batch: ScheduledBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return decodes' logits [n, vocab_size], eager and by graph."""
        graphs = self._graphs(batch)
        graph = None if graphs is None else graphs.find_decodes(batch)
        assert graph is not None
        with torch.inference_mode():
            computed = self._eager_forward(batch)()
            self._send(batch, self._rows.padded(self._rows.host_inputs(batch), graph.num_rows), {}, ())
            graph.forward.graph.replay()
        return computed, graph.forward.output[: len(batch.rows)]

    def _eager_forward(self, batch: ScheduledBatch) -> Callable[[], torch.Tensor]:
        changes, host = self._rows.update(batch), self._rows.host_inputs(batch)
        sent = self._send(batch, host, {}, changes)
        return partial(self._steps.forward, sent, ForwardBounds.exact(batch, host))

    def _computed(
        self, batch: ScheduledBatch, host: HostInputs, plan: SamplingPlan, changes: Group, graphs: StepGraphs | None
    ) -> tuple[SamplerOutput, Launch]:
        graph = None if graphs is None else graphs.find_prompts(batch)
        if graph is not None:
            host = self._rows.padded_tokens(host, graph.num_tokens)
        sent = self._send(batch, host, plan.groups(), changes)
        inputs, bounds = StepInputs(*sent["inputs"]), ForwardBounds.exact(batch, host)
        of_prompts: dict[str, Any] = {}
        if graph is not None:
            logits = graph.logits(self._rows.metadata(inputs, bounds), batch.num_tokens, inputs.logit_indices)
        elif plan.scoring is None and plan.pooling is None:
            logits = self._steps.forward(sent, bounds)
        else:
            logits, of_prompts = self._computed_with_prompts(plan, sent, bounds)
        sampled = self._sampled(logits, plan, sent, inputs.store_indices)._replace(**of_prompts)
        return sampled, "eager" if graph is None else "graphs of pieces"

    def _computed_with_prompts(
        self, plan: SamplingPlan, sent: DeviceArrays, bounds: ForwardBounds
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return logits, and the fields of `SamplerOutput` about prompts."""
        model, scored, pooled = self._steps.model, sent["prompt"], sent["pooling"]
        step = self._steps.input(sent, bounds)
        logits, states = model.forward_with_states(step, torch.cat((*scored, *pooled[:1])))
        of_prompts = sums = None
        if plan.scoring is not None:
            before, states = states.tensor_split([len(scored[0])])
            tokens = self._rows.tokens_at(StepInputs(*sent["inputs"]).token_indices.index_select(0, scored[0]) + 1)
            logits_of = lambda some: self._shard.gather(model.logits_of(some))  # noqa: E731
            of_prompts = score_prompts(before, logits_of, tokens, plan.scoring)
        if plan.pooling is not None:
            sums = pool_states(states, pooled[1], plan.pooling)
        return logits, {"prompt_logprobs": of_prompts, "pooled": sums}

    def _replayed(
        self, batch: ScheduledBatch, host: HostInputs, plan: SamplingPlan, changes: Group, graph: DecodeGraph
    ) -> SamplerOutput:
        count = len(batch.rows)
        sampler = {"largest": graph.greedy, "draw": graph.drawn}.get(plan.logit_use)
        sampling = plan.groups(count if sampler is None else graph.num_rows)
        sent = self._send(batch, self._rows.padded(host, graph.num_rows), sampling, changes)
        graph.forward.graph.replay()
        if sampler is not None:
            sampler.graph.replay()
            return SamplerOutput(sampler.output[:count])
        return self._sampled(graph.forward.output[:count], plan, sent, graph.inputs.store_indices[:count])

    def _send(self, batch: ScheduledBatch, host: HostInputs, sampling: Groups, changes: Group) -> DeviceArrays:
        lora = None
        if self._lora is not None and len(batch.lora_slots):
            lora = self._lora.groups(np.repeat(batch.lora_slots, batch.num_scheduled_tokens), len(host.positions))
        # The sizes of what comes first are those of a graph, so that the addresses are too.
        sent = self._sender({"lora": lora, "inputs": host, **sampling, "changes": changes})
        self._rows.apply(batch, sent["changes"])
        return sent

    def _sampled(
        self, logits: torch.Tensor, plan: SamplingPlan, sent: DeviceArrays, store_indices: torch.Tensor
    ) -> SamplerOutput:
        if not len(store_indices):
            return SamplerOutput()
        sampled = sample_part(logits, self._shard, plan, sent, partial(self._rows.history, store_indices))
        assert sampled.token_ids is not None
        self._rows.store(store_indices, sampled.token_ids)
        return sampled
