from __future__ import annotations

from collections.abc import Sequence

import torch

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.base import CausalLM, Progress, no_progress
from tidewheel.runner.accelerator import Accelerator, accelerator_of
from tidewheel.runner.block_transfers import BlockTransfers
from tidewheel.runner.decode_graphs import DecodeGraph, DecodeGraphs
from tidewheel.runner.forward import Forward, exact_bounds
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.inputs import DeviceInputs, HostInputs, RowTable
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import Cache, RunnerParts, allocate_cache, complete_info, graph_sizes, load_parts
from tidewheel.runner.pending import PendingTokens
from tidewheel.runner.profiling import (
    StepMemory,
    StepSize,
    estimated_activation_bytes,
    estimated_graph_bytes,
    largest_step,
    measured_activation_bytes,
    profile_batch,
    smallest_step,
)
from tidewheel.runner.sampler import NUM_GROUPS, Sampled, sample_tokens, staged_groups
from tidewheel.runner.sampling_plan import SamplingPlan, SamplingTable
from tidewheel.runner.staging import Group, Sender, Sent, SharedMemory, Staging
from tidewheel.runner.warm_up import warm_up

NUM_TRIAL_GRAPHS = 3
# Static input buffer: bytes per token and row, and room for new rows' tokens and blocks.
BYTES_PER_TOKEN = 24
BYTES_PER_ROW = 96
SPARE_BYTES = 1 << 20


class ModelRunner:
    """Runs scheduled batches; keeps the KV cache and each row's tokens, block table and sampling state.

    One thread only. Batches launch in scheduled order. On a CPU, without an accelerator, a launch returns a finished
    step.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: Cache,
        info: RunnerInfo,
        device: torch.device,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.info = info
        self.kv = cache.kv
        self._transfers = BlockTransfers(cache.kv, cache.host)
        self._model = model
        self._accelerator = accelerator
        self._rows = RowTable(
            info.max_num_seqs, info.max_model_len, info.block_size, device, shares_memory=accelerator is None
        )
        self._sampling = SamplingTable(info.max_num_seqs)
        self._sender: Sender = SharedMemory() if accelerator is None else Staging(accelerator, _static_bytes(info))
        self._forward = Forward(model, self._rows, cache.kv)
        self._graphs: DecodeGraphs | None = None

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> ModelRunner:
        """Load the model, size the cache and capture graphs. Raise `ConfigError` with one line."""
        parts = load_parts(config, progress or no_progress)
        accelerator, sizes, report = accelerator_of(parts.device), graph_sizes(config, parts), parts.stages
        report("profile", 0.0)
        cache, info = allocate_cache(parts, config, cls._measured(parts, config, accelerator, sizes))
        report("profile", 1.0)
        runner = cls(parts.model, cache, info, parts.device, accelerator)
        if accelerator is not None:
            warm_up(runner, report)
        graph_bytes = sum(runner.capture(sizes, report))
        runner.info = complete_info(info, parts, graph_bytes)
        return runner

    @classmethod
    def _measured(
        cls, parts: RunnerParts, config: EngineConfig, accelerator: Accelerator | None, sizes: Sequence[int]
    ) -> StepMemory:
        """Measure a step with a minimal cache, and prove that the model runs."""
        layout, device = parts.layout, parts.device
        largest = largest_step(config, parts.info.max_model_len)

        def run(size: StepSize) -> ModelRunner:
            cache = Cache(KVTensors(layout, size.num_blocks(layout.block_size), device), None)
            runner = cls(parts.model, cache, parts.info, device, accelerator)
            runner.run(profile_batch(size, layout.block_size))
            return runner

        if accelerator is None:
            run(smallest_step(parts.info.max_model_len))
            return StepMemory(estimated_activation_bytes(largest, layout.shape, layout.dtype), 0)
        runner, activation_bytes = measured_activation_bytes(run, largest, device)
        taken = runner.capture(sizes[-NUM_TRIAL_GRAPHS:], no_progress)
        return StepMemory(activation_bytes, estimated_graph_bytes(taken, len(sizes)))

    def capture(self, sizes: Sequence[int], progress: Progress) -> list[int]:
        """Capture decode graphs of these batch sizes; return the bytes of each, largest first.

        Raise `ConfigError` if memory does not suffice.
        """
        if not sizes or self._accelerator is None:
            return []
        self._graphs = DecodeGraphs(
            self._accelerator.graph_pool(), self._forward, self._rows, self._sender, self.info.max_model_len
        )
        try:
            with torch.inference_mode():
                return self._graphs.capture(sizes, progress)
        except torch.OutOfMemoryError:
            raise ConfigError(
                "the GPU has no room for CUDA graphs beside weights and cache: lower gpu_memory_utilization, "
                "kv_cache_memory_mb, num_blocks or max_num_seqs, or set enforce_eager"
            ) from None

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        """Start a step. On a CPU it is done on return; on CUDA only `PendingTokens.wait` waits for it.

        Several steps may be in flight: the device runs them in order.
        """
        with torch.inference_mode():
            self._transfers.start(batch)
            self._sampling.update(batch)
            pending = self._launch(batch)
        if self._accelerator is None:
            pending.wait()
        return pending

    def _launch(self, batch: ScheduledBatch) -> PendingTokens:
        changes = self._rows.update(batch)
        host = self._rows.host_inputs(batch)
        samples = batch.samples
        plan = self._sampling.plan(batch.rows[samples], host.seq_lens[samples]) if samples.any() else None
        graph = self._graphs.find(batch) if self._graphs is not None else None
        if plan is not None and graph is not None:
            sampled: Sampled | None = self._replayed(batch, host, plan, changes, graph)
        else:
            sampled = self._computed(batch, host, plan, changes)
        return PendingTokens(batch, plan, sampled, self._accelerator)

    def _computed(
        self, batch: ScheduledBatch, host: HostInputs, plan: SamplingPlan | None, changes: Group
    ) -> Sampled | None:
        sent = self._send(batch, host, staged_groups(plan), changes)
        inputs = DeviceInputs(*sent.group(0))
        logits = self._forward(inputs, exact_bounds(batch, host))
        return None if plan is None else self._sampled(logits, plan, sent, inputs.store_indices)

    def _replayed(
        self, batch: ScheduledBatch, host: HostInputs, plan: SamplingPlan, changes: Group, graph: DecodeGraph
    ) -> Sampled:
        count = len(batch.rows)
        padded = self._rows.padded(host, graph.num_rows)
        groups = staged_groups(plan, graph.num_rows if plan.is_plain else count)
        sent = self._send(batch, padded, groups, changes)
        graph.forward.replay()
        if plan.is_plain:
            return Sampled(graph.sample(any_sampled=plan.any_sampled)[:count], None)
        return self._sampled(graph.logits[:count], plan, sent, graph.inputs.store_indices[:count])

    def _send(
        self, batch: ScheduledBatch, host: HostInputs, sampling: Sequence[Group | None], changes: Group
    ) -> Sent:
        sent = self._sender.send([host, *sampling, changes])
        self._rows.apply(batch, sent.group(1 + NUM_GROUPS))
        return sent

    def _sampled(self, logits: torch.Tensor, plan: SamplingPlan, sent: Sent, store_indices: torch.Tensor) -> Sampled:
        staged = [sent.group(1 + i) for i in range(NUM_GROUPS)]
        sampled = sample_tokens(logits, plan, staged, self._rows.history(store_indices))
        self._rows.store(store_indices, sampled.token_ids)
        return sampled


def _static_bytes(info: RunnerInfo) -> int:
    return BYTES_PER_TOKEN * info.max_num_batched_tokens + BYTES_PER_ROW * info.max_num_seqs + SPARE_BYTES
