"""Decode steps of a model that several GPUs share, and measurements of others to check them by.

Sources are repository and number of an issue or pull request on GitHub, unless they are named otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

from modelled.roofline import H200, SHAPES, Device, Shape, kv_bytes_per_token, part_of, weights_bytes
from modelled.step_model import FACTORS, Host, Model, Work

ENDS = ("slow", "fast")  # of every factor
MEMORY_SHARE = 0.9  # of a GPU, for weights and KV cache: the default of `gpu_memory_utilization`
SEND_S = 7e-6  # of the host, for each other rank: `rank_messages`, rounded up
CANDIDATES, CANDIDATE_BYTES = 257, 8  # that a rank offers for a row: a logit and its token


class AllReduce(NamedTuple):
    """Time of an all-reduce: a start, and the message times what a link carries of it, over the link's speed."""

    start_us: dict[int, tuple[float, float]]  # by ranks; slow and fast
    carried: dict[int, float]  # by ranks
    bytes_per_s: tuple[float, float]  # of a link, one way; slow and fast
    source: str

    def seconds(self, num_bytes: float, num_ranks: int, end: str) -> float:
        index = ENDS.index(end)
        return 1e-6 * self.start_us[num_ranks][index] + num_bytes * self.carried[num_ranks] / self.bytes_per_s[index]

    def on_link(self, share: float) -> AllReduce:
        """Return the same on a link that has this share of the speed."""
        return self._replace(bytes_per_s=(share * self.bytes_per_s[0], share * self.bytes_per_s[1]))


RING = {2: 1.0, 4: 1.5, 8: 1.75}  # 2 (n - 1) / n
ONE_SHOT = {2: 1.0, 4: 3.0, 8: 7.0}  # every rank reads the message of every other
NVLINK = {
    "NCCL": AllReduce(
        {2: (12.0, 6.0), 4: (18.0, 13.0), 8: (21.0, 16.0)}, RING, (220e9, 300e9),
        "H100, in graphs: vllm 24111, 24532 and 42324, sglang 22734; 2 ranks: 6 us (nccl 1259), slow end estimated",
    ),
    "one-shot": AllReduce(
        {2: (6.0, 5.0), 4: (7.0, 6.0), 8: (8.0, 6.0)}, ONE_SHOT, (300e9, 380e9),
        "H100: vllm 24111 (ca_1stage), sglang 22734 (MSCCL++); 380 of NVLink's 450 GB/s one way (nccl 1264)",
    ),
    "two-shot": AllReduce(
        {2: (14.0, 9.0), 4: (16.0, 13.0), 8: (14.0, 9.0)}, RING, (300e9, 380e9),
        "H100, torch's symmetric memory: vllm 24111 and 42324; start with 2 ranks estimated",
    ),
}  # fmt: skip
PCIE = {
    "NCCL": AllReduce(
        {2: (20.0, 10.0), 4: (30.0, 20.0), 8: (42.0, 30.0)}, RING, (10e9, 24e9),
        "RTX 4090: 8 ranks: 42 us (nccl 1530), fewer estimated; 10 GB/s between sockets, 24 within (nccl-tests 307)",
    ),
}  # fmt: skip


class Machine(NamedTuple):
    device: Device
    memory_bytes: float  # of a GPU
    all_reduces: dict[str, AllReduce]
    source: str


MACHINES = {
    "H100 SXM": Machine(Device(3.0e12, 790e12), 80e9, NVLINK, "0.9 of the data sheet's 3.35 TB/s, as an H200 copies"),
    "H200": Machine(H200, 141e9, NVLINK, "measured: a copy, and a bf16 product"),
    "RTX 4090": Machine(
        Device(0.9e12, 132e12), 24e9, PCIE, "0.9 of the data sheet's 1,008 GB/s, 0.8 of its 165 TFLOP/s, as an H200"
    ),
}
A100 = Machine(
    Device(1.7e12, 250e12), 80e9, {name: way.on_link(600 / 900) for name, way in NVLINK.items()},
    "1.7 TB/s at 330 W (gpt-fast), 0.8 of the data sheet's 312 TFLOP/s; NVLink of 600 GB/s both ways, not 900",
)  # fmt: skip
H800 = Machine(
    Device(3.0e12, 790e12), 80e9, {name: way.on_link(400 / 900) for name, way in NVLINK.items()},
    "an H100 with NVLink of 400 GB/s both ways",
)  # fmt: skip


class TensorParallelModel:
    """Decode steps of a shape on some ranks, with all factors at their slow or their fast end."""

    def __init__(
        self, shape: Shape, machine: Machine, num_ranks: int, end: str, *, ways: tuple[str, ...],
        gathers_candidates: bool = True, host_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`ways`: all-reduces, of which each size takes the fastest. `gathers_candidates`: else all logits."""
        self.shape, self._machine, self.num_ranks, self._end = shape, machine, num_ranks, end
        self._part, self._gathers_candidates = part_of(shape, num_ranks), gathers_candidates
        self._ways = [machine.all_reduces[name] for name in ways if name in machine.all_reduces]
        self._host_s = host_s + SEND_S * (num_ranks - 1)
        self._model = Model(self._part, Host(host_s, 0.0, 0.0), end, device=machine.device)

    @property
    def num_all_reduces(self) -> int:
        """Count two for a layer, and one for the embedding."""
        return 2 * self.shape.layers + 1 if self.num_ranks > 1 else 0

    @property
    def max_kv_tokens(self) -> int:
        """Return the tokens that have room beside the weights, the embedding table included."""
        table = 0 if self.shape.tied else 2 * self._part.vocab * self.shape.hidden
        left = MEMORY_SHARE * self._machine.memory_bytes - weights_bytes(self._part) - table
        return max(int(left / kv_bytes_per_token(self._part)), 0)

    def all_reduce_seconds(self, batch: int) -> float:
        """Return the seconds of one all-reduce, of `hidden` two-byte values for each row."""
        if self.num_ranks == 1:
            return 0.0
        num_bytes = 2 * batch * self.shape.hidden
        return min(way.seconds(num_bytes, self.num_ranks, self._end) for way in self._ways)

    def seconds_without_all_reduces(self, batch: int, context: float) -> float:
        return self._model.step(Work(batch, context)).device_s + self._gather_seconds(batch)

    def seconds(self, batch: int, context: float) -> float:
        """Return the longer of device and host."""
        all_reduces_s = self.num_all_reduces * self.all_reduce_seconds(batch)
        return max(self.seconds_without_all_reduces(batch, context) + all_reduces_s, self._host_s)

    def prompt_seconds(self, num_tokens: int) -> float:
        """Return the seconds of a step with one whole prompt, without the host's."""
        work = Work(0, 0.0, num_tokens, num_tokens**2 / 2, 1)
        all_reduces_s = self.num_all_reduces * self.all_reduce_seconds(num_tokens)
        return self._model.step(work).device_s + self._gather_seconds(1) + all_reduces_s

    def num_running(self, batch: int, context: int) -> int:
        """Return the requests of a batch that have room in the KV cache; others wait."""
        return min(batch, self.max_kv_tokens // context)

    def tokens_per_s(self, batch: int, context: int) -> float:
        running = self.num_running(batch, context)
        return running / self.seconds(running, context) if running else 0.0

    def _gather_seconds(self, batch: int) -> float:
        """Return the seconds to bring what is sampled from to rank 0, and the sampled tokens to all."""
        if self.num_ranks == 1:
            return 0.0
        nccl, vocab = self._machine.all_reduces["NCCL"], self.shape.vocab
        row_bytes = CANDIDATES * CANDIDATE_BYTES * self.num_ranks if self._gathers_candidates else 2 * vocab
        gather_s = nccl.seconds(batch * row_bytes / 2, self.num_ranks, self._end)  # carries half of an all-reduce
        broadcast_s = nccl.seconds(0, self.num_ranks, self._end)
        if self._gathers_candidates:
            return gather_s + broadcast_s
        bandwidth, sampling = self._machine.device.copy_bandwidth, float(getattr(FACTORS["sampling"], self._end))
        copied_s = 4 * batch * vocab / bandwidth  # logits by rank become logits by row
        sampled_s = 2 * batch * (vocab - self._part.vocab) / (sampling * bandwidth)  # rank 0 reads all of them
        return gather_s + broadcast_s + copied_s + sampled_s


# All-reduces over NVLink: way, ranks, KiB, and published microseconds. The parts read of sglang 22734 and vllm 42324
# name neither GPU nor ranks: 8 of Hopper are assumed, from the headings that follow them.
PUBLISHED_ALL_REDUCES = (
    ("NCCL", 4, 512, 17, "vllm 24111"), ("NCCL", 4, 1024, 19, "vllm 24111"), ("NCCL", 4, 4096, 37, "vllm 24111"),
    ("NCCL", 4, 512, 21, "vllm 24532"), ("NCCL", 4, 1024, 23, "vllm 24532"), ("NCCL", 4, 4096, 39, "vllm 24532"),
    ("NCCL", 8, 8, 17.2, "sglang 22734"), ("NCCL", 8, 256, 20.3, "sglang 22734"),
    ("NCCL", 8, 1024, 27, "sglang 22734"), ("NCCL", 8, 1024, 25, "vllm 42324"), ("NCCL", 8, 4096, 50, "vllm 42324"),
    ("one-shot", 2, 512, 7, "vllm 24111"), ("one-shot", 4, 512, 10, "vllm 24111"),
    ("one-shot", 4, 1024, 15, "vllm 24111"), ("one-shot", 4, 4096, 38, "vllm 24111"),
    ("one-shot", 8, 8, 6.0, "sglang 22734"),
    ("two-shot", 4, 512, 18, "vllm 24111"), ("two-shot", 4, 1024, 19, "vllm 24111"),
    ("two-shot", 4, 4096, 29, "vllm 24111"),
    ("two-shot", 8, 512, 15, "vllm 42324"), ("two-shot", 8, 1024, 17, "vllm 42324"),
    ("two-shot", 8, 4096, 37, "vllm 42324"),
)  # fmt: skip


class PublishedSteps(NamedTuple):
    """Decode steps of another engine: shape, ranks, rows, and published milliseconds.

    The first one tells how much longer than ours a layer of this engine takes, whatever the ranks and rows.
    """

    source: str
    machine: Machine
    way: str
    context: int
    steps: tuple[tuple[Shape, int, int, float], ...]


LLAMA_3_8B, QWEN3_8B = SHAPES["llama-3.1-8b"], SHAPES["qwen3-8b"]
LLAMA_2_7B = Shape(4096, 32, 11_008, 32, 32, 128, 32_000, False, False, 1e4, 4096)
LLAMA_2_70B = Shape(8192, 80, 28_672, 64, 8, 128, 32_000, False, False, 1e4, 4096)
QWEN3_32B = Shape(5120, 64, 25_600, 64, 8, 128, 151_936, False, True, 1e6)
PUBLISHED_STEPS = (
    PublishedSteps(
        "gpt-fast, Llama-2 7B and 70B, A100 (its README)", A100, "one-shot", 100, (
            (LLAMA_2_7B, 1, 1, 1e3 / 104.9), (LLAMA_2_7B, 2, 1, 1e3 / 168.84), (LLAMA_2_7B, 4, 1, 1e3 / 254.02),
            (LLAMA_2_7B, 8, 1, 1e3 / 328.43), (LLAMA_2_70B, 2, 1, 1e3 / 21.32), (LLAMA_2_70B, 4, 1, 1e3 / 38.01),
            (LLAMA_2_70B, 8, 1, 1e3 / 62.50),
        ),
    ),
    PublishedSteps(
        "SGLang of 2024-08, Llama-3-8B, H100 assumed (sglang 1008)", MACHINES["H100 SXM"], "one-shot", 132,
        ((LLAMA_3_8B, 1, 1, 7.37), (LLAMA_3_8B, 8, 1, 3.35), (LLAMA_3_8B, 1, 128, 11.84)),
    ),
    PublishedSteps(
        "LMDeploy 0.1, Llama-2-70B, A100 (its a100_fp16.md)", A100, "NCCL", 1152, (
            (LLAMA_2_70B, 4, 1, 1e3 / 32.38), (LLAMA_2_70B, 4, 16, 16e3 / 482.99),
            (LLAMA_2_70B, 4, 32, 32e3 / 853.56), (LLAMA_2_70B, 4, 64, 64e3 / 1391.8),
        ),
    ),
    PublishedSteps(
        "torch in graphs, Qwen3 8B and 32B, H800 (Triton-distributed 93)", H800, "NCCL", 512,
        ((QWEN3_8B, 8, 1, 5.49), (QWEN3_32B, 8, 1, 10.80)),
    ),
    PublishedSteps(
        "the same, all-reduces in Triton", H800, "one-shot", 512, ((QWEN3_8B, 8, 1, 4.65), (QWEN3_32B, 8, 1, 9.18)),
    ),
)  # fmt: skip
