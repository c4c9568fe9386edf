import itertools
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from tidewheel.audio_file import SAMPLES_PER_POSITION
from tidewheel.batch import SPARE_LOGITS
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import CausalLM, NativeModel, Progress
from tidewheel.models.decoder import Decoder
from tidewheel.models.loader import STAGE, load_model, plan_model
from tidewheel.models.model_folder import read_config, resolve_folder
from tidewheel.models.shard import Shard
from tidewheel.models.whisper import Whisper
from tidewheel.runner.device import (
    CompileLog,
    check_deterministic,
    device_name,
    limit_threads,
    prepare_kernels,
    resolve_device,
)
from tidewheel.runner.drafter import DraftModel, find_draft_source
from tidewheel.runner.encoder_cache import EncoderCache
from tidewheel.runner.host_memory import MemoryClaim, available_host_bytes, keep_freed_memory, total_host_bytes
from tidewheel.runner.host_tier import BlockTransfers, HostBlocks, decide_num_host_blocks, num_staged_blocks
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.kv_tensors import (
    CacheLayout,
    KVTensors,
    MemoryBudget,
    cache_layout,
    decide_size,
    limited_budget,
)
from tidewheel.runner.step_graphs import GraphSizes, decode_sizes, prompt_sizes, unsplit_sizes
from tidewheel.settings import MIB, shown_bytes

logger = logging.getLogger(__name__)
BLOCK_SIZES = {"cpu": 16, "cuda": 64}
LEAST_FULL_BYTES = 512 * MIB  # leaves room for cached prompts
FRONT_END_BYTES = 256 * MIB  # of the second front end of `serve --model`, which starts after the engine


class StageClock:
    def __init__(self, report: Progress, clock: Callable[[], float] = time.perf_counter) -> None:
        self._report = report
        self._clock = clock
        self._begun = [("start", clock())]

    def __call__(self, stage: str, fraction: float) -> None:
        if stage != self._begun[-1][0]:
            self._begun.append((stage, self._clock()))
        self._report(stage, fraction)

    def seconds(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        for (stage, began), (_, ended) in itertools.pairwise([*self._begun, ("", self._clock())]):
            seconds[stage] = seconds.get(stage, 0.0) + ended - began
        return seconds


class RunnerParts(NamedTuple):
    model: CausalLM
    layout: CacheLayout
    info: RunnerInfo
    device: torch.device
    compile_log: CompileLog | None = None
    claim: MemoryClaim | None = None  # None on a GPU
    encoder: EncoderCache | None = None
    shard: Shard = Shard()
    draft: DraftModel | None = None


def load_parts(config: EngineConfig, progress: Progress, shard: Shard | None = None) -> RunnerParts:
    device, shard = resolve_device(config), shard or Shard()
    check_deterministic(config.deterministic, device)
    compile_log = prepare_kernels(device)
    folder = resolve_folder(config.model, config.revision, config.download_dir)
    fields = read_config(folder)
    progress(STAGE, 0.0)
    plan, claim = plan_model(folder, fields, config, device, shard), None
    source = plan.open_source()
    num_bytes = plan.check_fits(source)
    draft_source = find_draft_source(plan, beside=num_bytes)
    if device.type == "cpu":
        takes_share = config.has_automatic_cache and config.device_memory_share is None
        num_bytes += draft_source.num_bytes if draft_source is not None else 0
        claim = MemoryClaim(takes_share=takes_share, others=num_bytes, num_ranks=shard.num_ranks)
    model, draft = load_model(plan, source, progress), None
    if device.type == "cpu":
        keep_freed_memory()
        if config.num_threads is None:
            limit_threads(model.weights_bytes)
    layout = cache_layout(plan, model, config.block_size or BLOCK_SIZES[device.type])
    if draft_source is not None:
        draft = draft_source.load(model, layout.block_size, progress)
        layout = layout._replace(draft_bytes=draft.block_bytes)
    encoder, max_num_seqs, num_samples = None, config.max_num_seqs, 0
    if isinstance(model, Whisper):
        free = available_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
        encoded = layout._replace(dtype=plan.dtype)
        encoder = EncoderCache(
            model, encoded, max_num_seqs=max_num_seqs, max_num_tokens=config.max_num_batched_tokens, free_bytes=free
        )
        max_num_seqs, num_samples = encoder.num_slots, model.config.max_source_positions * SAMPLES_PER_POSITION
    info = RunnerInfo(
        model=str(folder),
        architecture=plan.architecture,
        is_native=plan.native is not None,
        device=device_name(device) + (f", {shard.num_ranks} ranks" if shard.num_ranks > 1 else ""),
        dtype=str(plan.dtype).removeprefix("torch."),
        kv_cache_dtype=str(plan.cache_dtype).removeprefix("torch.") if plan.cache_dtype != plan.dtype else "",
        vocab_size=layout.shape.vocab_size,
        max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=layout.block_size,
        weights_bytes=model.weights_bytes + (0 if draft is None else draft.weights_bytes),
        copy_bytes=model.copy_bytes if isinstance(model, NativeModel) else 0,
        lora_bytes=model.lora_bytes if isinstance(model, NativeModel) else 0,
        device_bytes=torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0,
        max_audio_samples=num_samples,
    )
    return RunnerParts(model, layout, info, device, compile_log, claim, encoder, shard, draft)


def allocate_cache(
    parts: RunnerParts, config: EngineConfig, activation_bytes: int, graph_bytes: int
) -> tuple[BlockTransfers, RunnerInfo]:
    layout, device = parts.layout, parts.device
    if parts.draft is not None:
        parts.draft.kv_layers = ()  # the trial's, or its memory counts as taken
    num_host_blocks = decide_num_host_blocks(config.swap_space, layout, available_host_bytes())
    staging_bytes = num_staged_blocks(layout.block_bytes, num_host_blocks) * layout.block_bytes
    needs = {"steps and graphs": activation_bytes + graph_bytes + staging_bytes}
    if parts.encoder is not None:
        needs |= {"encoded audio": parts.encoder.unbacked_bytes}
    if parts.claim is not None:
        needs |= {"weights": parts.info.weights_bytes, "swap_space": num_host_blocks * layout.block_bytes}
    budget = cache_budget(config, layout, parts.info.max_model_len, needs, device, parts.claim)
    is_automatic = config.max_model_len == "auto"
    size = decide_size(config.num_blocks, budget, layout, parts.info.max_model_len, may_shorten=is_automatic)
    counts = size.num_blocks, size.max_model_len, num_host_blocks
    num_blocks, max_model_len, num_host_blocks = parts.shard.least(counts, device)
    kv, num_bytes = _allocate(layout, num_blocks, device, budget), num_blocks * layout.all_block_bytes
    try:
        cache = BlockTransfers(kv, HostBlocks(kv, num_host_blocks) if num_host_blocks else None)
    except RuntimeError as error:
        raise ConfigError(
            f"swap_space is {config.swap_space:g} GiB: so much host memory cannot be had; lower it"
        ) from error
    if parts.claim is not None:
        parts.claim.take(num_bytes)
    info = msgspec.structs.replace(
        parts.info, num_blocks=num_blocks, max_model_len=max_model_len, cache_source=size.source,
        shortened=size.shortened, activation_bytes=activation_bytes, kv_cache_bytes=num_bytes,
        num_host_blocks=num_host_blocks, swap_seconds_per_block=cache.seconds_per_block(),
    )  # fmt: skip
    return cache, info


def graph_sizes(config: EngineConfig, parts: RunnerParts) -> GraphSizes:
    if parts.device.type == "cpu" or config.enforce_eager:
        cause = "the device is a CPU" if parts.device.type == "cpu" else "enforce_eager is set"
        logger.info("CUDA graphs: none, %s", cause)
        return GraphSizes()
    budget = config.max_num_batched_tokens
    prompts = prompt_sizes(budget) if isinstance(parts.model, Decoder) else ()
    most = parts.info.max_num_seqs + (0 if config.speculation == "none" else SPARE_LOGITS)
    decodes, shape = decode_sizes(min(most, budget)), parts.model.shape
    if config.deterministic:
        return GraphSizes(decodes, prompts)
    unsplit = unsplit_sizes(decodes, shape.num_kv_heads, parts.info.max_model_len, parts.device)
    return GraphSizes(decodes, prompts, unsplit)


def cache_budget(
    config: EngineConfig,
    layout: CacheLayout,
    max_model_len: int,
    needs: Mapping[str, int],
    device: torch.device,
    claim: MemoryClaim | None,
) -> MemoryBudget:
    """Return the memory of the cache: as set, or what limits, other programs and the largest use leave to it.

    `needs`: other bytes by name, on a GPU those not taken yet. `claim`: None on a GPU.
    """
    setting, megabytes, taken = "kv_cache_memory_mb", config.kv_cache_memory_mb, sum(needs.values())
    if claim is None:
        if megabytes is None:
            return gpu_budget(config, needs, device)
        return MemoryBudget(megabytes * MIB, f"{setting} {megabytes}", setting)
    later = FRONT_END_BYTES if megabytes is None else 0
    free, num_engines = claim.spare(max(available_host_bytes() - later, 0), taken)
    budget = partial(MemoryBudget, setting=setting, host_bytes=free)
    if megabytes is not None:
        return budget(megabytes * MIB, f"{setting} {megabytes}")
    if (share := config.device_memory_share) is not None:  # of the host, which all ranks share
        limited = limited_budget(share, total_host_bytes() // config.tensor_parallel_size, claim.base + taken, free)
    else:
        sharing = f" for each of {num_engines} engines that load" if num_engines > 1 else ""
        limited = budget(free // 2, f"half of the {shown_bytes(free)} of memory to spare{sharing}")
    blocks_of_all = config.max_num_seqs * -(-max_model_len // layout.block_size)
    most = max(blocks_of_all * layout.all_block_bytes, LEAST_FULL_BYTES)
    if most <= limited.bytes:
        return budget(most, f"all that max_num_seqs {config.max_num_seqs} can use")
    return limited


def _allocate(layout: CacheLayout, num_blocks: int, device: torch.device, budget: MemoryBudget) -> KVTensors:
    try:
        return KVTensors(layout, num_blocks, device)
    except (RuntimeError, OSError) as error:  # CUDA raises RuntimeError, mmap OSError
        room = ""
        if device.type == "cuda":
            room = f"at most {torch.cuda.mem_get_info(device)[0] // layout.all_block_bytes} blocks are free; "
        raise ConfigError(
            f"a KV cache of {num_blocks * layout.all_block_bytes // MIB} MiB ({num_blocks} blocks) cannot be "
            f"allocated: {room}lower num_blocks or {budget.setting}"
        ) from error


def gpu_budget(config: EngineConfig, needs: Mapping[str, int], device: torch.device) -> MemoryBudget:
    """Return what the engine's share leaves for the cache. `needs`: other bytes by name, not taken yet."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own, coming = torch.cuda.memory_reserved(device), sum(needs.values())
    if (share := config.device_memory_share) is not None:
        return limited_budget(share, total, own + coming, free - coming, is_of_gpu=True)
    fraction, taken = config.gpu_memory_utilization, total - free
    needed = " and ".join(f"{name} need {size // MIB}" for name, size in needs.items())
    source = (
        f"gpu_memory_utilization {fraction} of {total // MIB} MiB ({taken // MIB} are taken, {(taken - own) // MIB} "
        f"of them by CUDA itself and other programs, and {needed})"
    )
    allowed = left_of_utilization(fraction, total, taken, coming)
    return MemoryBudget(allowed, source, "gpu_memory_utilization", total, fraction)


def left_of_utilization(fraction: float, total: int, taken: int, coming: int) -> int:
    """Return the bytes for a cache by `gpu_memory_utilization`, which counts what all programs have taken."""
    return int(total * fraction) - taken - coming
