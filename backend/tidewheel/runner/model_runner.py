"""Everything that touches the device happens here."""

from __future__ import annotations

import torch

from tidewheel.batch import SampledTokens, ScheduledBatch
from tidewheel.config import EngineConfig
from tidewheel.models.base import CausalLM, Progress, no_progress
from tidewheel.runner.block_transfers import BlockTransfers
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.inputs import DeviceInputs, HostInputs, RowTable, metadata
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import Cache, RunnerParts, allocate_cache, load_parts
from tidewheel.runner.pending import PendingTokens
from tidewheel.runner.profiling import (
    estimated_activation_bytes,
    largest_step,
    measured_activation_bytes,
    profile_batch,
    warm_up_step,
)
from tidewheel.runner.sampler import sample_tokens, staged_groups
from tidewheel.runner.sampling_plan import SamplingPlan, SamplingTable
from tidewheel.runner.staging import Staging


class ModelRunner:
    """Runs scheduled batches: keeps tokens, block tables and sampling state of every row, and the KV cache.

    One thread only. Batches are launched in the order they were scheduled.
    """

    def __init__(self, model: CausalLM, cache: Cache, info: RunnerInfo, device: torch.device) -> None:
        self.info = info
        self.kv = cache.kv
        self._transfers = BlockTransfers(cache.kv, cache.host)
        self._model = model
        self._device = device
        self._rows = RowTable(info.max_num_seqs, info.max_model_len, info.block_size, device)
        self._sampling = SamplingTable(info.max_num_seqs)
        self._staging = Staging(device)
        self._last: PendingTokens | None = None

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> ModelRunner:
        """Loads what `config` names and sizes the cache. Raises `ConfigError` in one line."""
        report = progress or no_progress
        parts = load_parts(config, report)
        report("profile", 0.0)
        activation_bytes = cls._activation_bytes(parts, config)
        cache, info = allocate_cache(parts, config, activation_bytes)
        report("profile", 1.0)
        return cls(parts.model, cache, info, parts.device)

    @classmethod
    def _activation_bytes(cls, parts: RunnerParts, config: EngineConfig) -> int:
        """Runs a step with a cache just large enough for it, which also proves that the model runs."""
        layout, device = parts.layout, parts.device
        largest = largest_step(config, parts.info.max_model_len)
        size = warm_up_step(parts.info.max_model_len) if device.type == "cpu" else largest

        def run() -> None:
            cache = Cache(KVTensors(layout, size.num_blocks(layout.block_size), device), None)
            cls(parts.model, cache, parts.info, device).run(profile_batch(size, layout.block_size))

        if device.type == "cpu":
            run()
            return estimated_activation_bytes(largest, layout.shape, layout.dtype)
        return measured_activation_bytes(run, config, device)

    def run(self, batch: ScheduledBatch) -> SampledTokens:
        return self.launch(batch).wait()

    def launch(self, batch: ScheduledBatch) -> PendingTokens:
        """Starts one step. On a CPU it is done on return; on CUDA only `PendingTokens.wait` waits for it."""
        with torch.inference_mode():
            self._transfers.start(batch)
            self._rows.update(batch)
            self._sampling.update(batch)
            pending = self._launch(batch)
        if self._device.type == "cpu":
            pending.wait()
        self._last = pending
        return pending

    def _launch(self, batch: ScheduledBatch) -> PendingTokens:
        host = self._rows.host_inputs(batch)
        plan = self._plan(batch, host) if batch.samples.any() else None
        staged = self._staging.to_device([host, *(staged_groups(plan) if plan is not None else ())])
        inputs = DeviceInputs(*staged[0])
        token_ids = self._rows.flat_token_ids.index_select(0, inputs.token_indices)
        meta = metadata(host, inputs, batch)
        logits = self._model.forward(token_ids, inputs.positions, meta, self.kv.layers, inputs.logit_indices)
        if plan is None:
            return PendingTokens(batch, None, None)
        sampled = sample_tokens(logits, plan, staged[1:])
        self._rows.flat_token_ids.index_copy_(0, inputs.store_indices, sampled.token_ids.clamp(min=0).int())
        return PendingTokens(batch, plan, sampled)

    def _plan(self, batch: ScheduledBatch, host: HostInputs) -> SamplingPlan:
        rows = batch.rows[batch.samples]
        if self._last is not None and self._sampling.reads_history(rows):
            self._last.wait()
        return self._sampling.plan(rows, host.seq_lens[batch.samples])
