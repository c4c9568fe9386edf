"""Device operations of an LLM engine: triton-lang kernels for GPUs, batched torch for CPUs, a reference for each.

Only torch is imported; triton-lang is imported when the first kernel runs. Launches use the current CUDA device: call
``torch.cuda.set_device`` for another than 0. `tidewheel_kernels.backend` chooses implementations.
"""

from tidewheel_kernels.activation import silu_and_mul
from tidewheel_kernels.attention import paged_attention
from tidewheel_kernels.backend import KernelUnavailable
from tidewheel_kernels.kv_cache import copy_blocks, write_kv_cache
from tidewheel_kernels.logprobs import LogprobsOutput, compute_logprobs
from tidewheel_kernels.metadata import AttentionMetadata
from tidewheel_kernels.penalties import (
    PenaltyTensors,
    TokenHistory,
    WordTensors,
    apply_logit_bias,
    apply_penalties,
    forbid_words,
)
from tidewheel_kernels.rms_norm import rms_norm
from tidewheel_kernels.rope import rope_and_cache
from tidewheel_kernels.sampling import SampleOutput, SamplingTensors, sample

__all__ = [
    "AttentionMetadata",
    "KernelUnavailable",
    "LogprobsOutput",
    "PenaltyTensors",
    "SampleOutput",
    "SamplingTensors",
    "TokenHistory",
    "WordTensors",
    "apply_logit_bias",
    "apply_penalties",
    "compute_logprobs",
    "copy_blocks",
    "forbid_words",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "sample",
    "silu_and_mul",
    "write_kv_cache",
]
