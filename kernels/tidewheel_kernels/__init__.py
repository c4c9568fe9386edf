"""Device operations of an LLM engine, one folder each.

    __init__.py          operation: arguments, checks, choice of an implementation
    reference.py         definition in plain torch
    triton_kernels.py    triton-lang kernels and launchers, for a GPU
    cpu.py               torch operations or the C kernel, for a CPU

Implementations take the same arguments, without defaults. Files named ``triton_`` are imported when the first kernel
runs. Launches use the current CUDA device.
"""

from tidewheel_kernels.activation import silu_and_mul
from tidewheel_kernels.attention import paged_attention
from tidewheel_kernels.attention.metadata import AttentionMetadata
from tidewheel_kernels.choice import runs_triton
from tidewheel_kernels.invariant_linear import invariant_linear
from tidewheel_kernels.kv_cache import copy_blocks, write_kv_cache
from tidewheel_kernels.kv_cache.codes import INT8
from tidewheel_kernels.kv_cache.reference import FP8
from tidewheel_kernels.logprobs import compute_logprobs
from tidewheel_kernels.logprobs.reference import LogprobsOutput
from tidewheel_kernels.norm import rms_norm
from tidewheel_kernels.penalties import apply_logit_bias, apply_penalties, forbid_words
from tidewheel_kernels.penalties.reference import PenaltyTensors, TokenHistory, WordTensors
from tidewheel_kernels.rope import rope_and_cache
from tidewheel_kernels.sampling import SampleOutput, sample
from tidewheel_kernels.sampling.reference import SamplingTensors
from tidewheel_kernels.scaled_linear import quantize_rows, scaled_linear
from tidewheel_kernels.switches import KernelUnavailable
from tidewheel_kernels.token_mask import apply_token_mask

__all__ = [
    "FP8",
    "INT8",
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
    "apply_token_mask",
    "compute_logprobs",
    "copy_blocks",
    "forbid_words",
    "invariant_linear",
    "paged_attention",
    "quantize_rows",
    "rms_norm",
    "rope_and_cache",
    "runs_triton",
    "sample",
    "scaled_linear",
    "silu_and_mul",
    "write_kv_cache",
]
