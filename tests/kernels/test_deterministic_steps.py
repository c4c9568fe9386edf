"""With `deterministic`, equal tokens get bitwise equal logits, however steps are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.runner.step_loop import GREEDY, StepLoop, request
from tidewheel.config import EngineConfig
from tidewheel.request import Request
from tidewheel.runner.inputs import DeviceArrays, DeviceInputs, ForwardBounds, HostInputs
from tidewheel.runner.model_runner import ModelRunner
from tidewheel.runner.step_graphs import StepModel
from tidewheel.sampling import SamplingParams
from tidewheel_kernels.choice import Choices, Op
from tidewheel_kernels.invariant_linear import triton_kernels as products
from tidewheel_kernels.launch_config import LinearConfig, cdiv, linear_config

VOCAB_SIZE, NUM_TOKENS = 60, 3
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB_SIZE, "hidden_size": 48,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 48, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32", "sliding_window": None, "attention_bias": False,
}  # fmt: skip
NUM_PADDED = 1  # steps that are computed once more with rows of padding
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
BIASED = SamplingParams(temperature=1.0, logit_bias={3: 2.0}, seed=6)


def small_tiles(out_features: int, in_features: int, element_size: int) -> LinearConfig:
    """Split small matrices too, and let a longer prompt take the way of many rows."""
    config = linear_config(out_features, in_features, element_size)
    return config._replace(block_m=16, block_k=32, split_len=32, num_splits=cdiv(in_features, 32))


@pytest.fixture
def runner(device: str, exact_rows: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(products, "linear_config", small_tiles)
    monkeypatch.setattr(products, "MOST_SPLIT_TILES", 1)
    if device == "cpu":
        monkeypatch.setenv("TIDEWHEEL_KERNELS", "triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in [module for name, module in sys.modules.items() if name.startswith("tidewheel_kernels.")]:
        for operation in [value for value in vars(module).values() if isinstance(value, Op)]:
            monkeypatch.setattr(operation, "chosen", Choices(operation))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    settings = {"num_blocks": 12, "block_size": 16, "max_num_seqs": 4, "num_threads": 1, "enforce_eager": True}
    runner = ModelRunner.load(
        EngineConfig(
            model=str(tmp_path),
            load_format="dummy",
            dtype="float32" if device == "cpu" else "bfloat16",
            device=device,
            deterministic=True,
            **settings,
        )
    )
    for layer in runner._steps.model._linears:
        layer.weight.mul_(8)
    return runner


class Ledger:
    """Bits of the logits behind each sequence of tokens, from all steps of a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.bits: dict[bytes, bytes] = {}
        self.num_repeated = self.num_padded = 0
        self._forward, self._rows = runner._steps.forward, runner._rows

    def forward(self, sent: DeviceArrays, bounds: ForwardBounds) -> torch.Tensor:
        inputs, logits = DeviceInputs(*sent["inputs"]), self._forward(sent, bounds)
        owners = torch.searchsorted(inputs.cu_seqlens_q[1:], inputs.logit_indices, right=True)
        places = inputs.rows[owners].tolist(), inputs.positions[inputs.logit_indices].tolist()
        for row, position, found in zip(*places, logits.cpu(), strict=True):
            tokens = self._rows._device_tokens[row, : position + 1].cpu().numpy().tobytes()
            bits = found.numpy().tobytes()
            self.num_repeated += tokens in self.bits
            assert self.bits.setdefault(tokens, bits) == bits, f"row {row} at {position}"
        if bounds.num_decodes == len(inputs.rows) and self.num_padded < NUM_PADDED:
            self._check_padded(inputs, logits)
        return logits

    def _check_padded(self, inputs: DeviceInputs, logits: torch.Tensor) -> None:
        """Compute decodes as a graph does: with rows of padding, and bounds for every length."""
        host = HostInputs(*(column.cpu().numpy() for column in inputs))
        padded = self._rows.padded(host, 4)
        bounds = ForwardBounds(max_seqlen_q=1, max_seq_len=48, num_decodes=4)
        tensors = DeviceInputs(*(torch.from_numpy(column).to(logits.device) for column in padded))
        sent: DeviceArrays = {"inputs": list(tensors), "lora": []}
        assert torch.equal(self._forward(sent, bounds)[: len(logits)], logits)
        self.num_padded += 1


def requests(prefix: str = "") -> list[Request]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCAB_SIZE, length, dtype=np.int32) for length in (15, 18, 3)]
    return [
        request(f"{prefix}{i}", prompt, NUM_TOKENS, sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, (GREEDY, DRAWN, BIASED), strict=True))
    ]


def test_logits_and_tokens_do_not_depend_on_the_batch(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(runner)
    monkeypatch.setattr(StepModel, "forward", lambda _, *step: ledger.forward(*step))
    alone = [StepLoop(runner, prefix_caching=False).run([one])[0] for one in requests()]
    assert len(ledger.bits) == 3 * NUM_TOKENS and not ledger.num_repeated
    together = StepLoop(runner, num_blocks=3, token_budget=7)
    assert together.run(requests()) == alone
    assert together.run(requests("again ")[1:2]) == alone[1:2]
    stats = together.scheduler.stats()
    assert stats.num_preemptions and stats.num_device_hits
    assert len(ledger.bits) == 3 * NUM_TOKENS and ledger.num_repeated >= 4 * NUM_TOKENS
    assert ledger.num_padded == NUM_PADDED
