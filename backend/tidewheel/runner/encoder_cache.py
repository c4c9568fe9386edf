import logging

import numpy as np
import torch

from tidewheel.audio_file import SAMPLING_RATE
from tidewheel.batch import ScheduledBatch
from tidewheel.models.causal_lm import EncoderInput
from tidewheel.models.whisper import POSITIONS_PER_SECOND, Whisper
from tidewheel.request import Request
from tidewheel.runner.inputs import DeviceInputs, ForwardBounds
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.settings import shown_bytes
from tidewheel_kernels import AttentionMetadata

log = logging.getLogger(__name__)

MAX_FREE_SHARE = 0.25  # of memory, for slots
NO_SLOT = -1


class EncoderCache:
    """Cross-attention keys and values of encoded audio, a slot for each content.

    A slot stays while a row reads it; of the others, the least recently assigned is replaced first.
    """

    def __init__(
        self, model: Whisper, layout: CacheLayout, *, max_num_seqs: int, max_num_tokens: int, free_bytes: int
    ) -> None:
        """Take at most `MAX_FREE_SHARE` of `free_bytes`, but one slot at least."""
        from transformers import WhisperFeatureExtractor  # importing it takes seconds

        config, device = model.config, model.device
        self._model, self._num_positions = model, config.max_source_positions
        num_blocks = -(-config.max_source_positions // layout.block_size)
        slot_bytes = num_blocks * layout.block_bytes
        self.num_slots = max(1, min(max_num_seqs, int(free_bytes * MAX_FREE_SHARE) // slot_bytes))
        self._kv = KVTensors(layout, self.num_slots * num_blocks, device)
        blocks = torch.arange(self.num_slots * num_blocks, dtype=torch.int32, device=device)
        self._blocks = blocks.view(self.num_slots, num_blocks)
        self._row_blocks = torch.zeros((self.num_slots + 1, num_blocks), dtype=torch.int32, device=device)  # by row
        self._positions = torch.arange(config.max_source_positions, device=device)
        self._slot_tokens = num_blocks * layout.block_size
        self._row_slots = np.full(self.num_slots, NO_SLOT)
        # Slots by tenant and content, the latest last; those without content by their numbers.
        self._cached: dict[tuple[str, str] | int, int] = {slot: slot for slot in range(self.num_slots)}
        self._starts = torch.arange(max_num_tokens + 1, dtype=torch.int32, device=device)
        self._lengths = torch.full((max_num_tokens,), config.max_source_positions, dtype=torch.int32, device=device)
        self._host_meta = self._starts.cpu().numpy(), self._lengths.cpu().numpy()
        seconds = config.max_source_positions // POSITIONS_PER_SECOND
        self._features = WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
            feature_size=config.num_mel_bins, chunk_length=seconds
        )
        self.num_encoded = 0
        log.info("encoded audio: %d slots of %s", self.num_slots, shown_bytes(slot_bytes))

    @property
    def unbacked_bytes(self) -> int:
        """Return the bytes of an encoder run, and on a CPU those of the slots, which are not touched yet."""
        slots = self._kv.num_bytes if self._kv.device.type == "cpu" else 0
        return slots + self._model.encoder_activation_bytes

    def update(self, batch: ScheduledBatch) -> None:
        """Assign new rows the slots of their audio; encode audio that has no slot."""
        self._row_slots[batch.freed_rows] = NO_SLOT
        for new in batch.new_rows:
            self._row_slots[new.row] = NO_SLOT
            if new.request.inputs is not None:  # a warm-up has none
                slot = self._row_slots[new.row] = self._slot_of(new.request)
                self._row_blocks[new.row].copy_(self._blocks[slot])

    def input(self, inputs: DeviceInputs) -> EncoderInput:
        count, rows = len(inputs.positions), inputs.rows
        if count > len(rows):
            rows = rows.repeat_interleave(inputs.cu_seqlens_q.diff(), output_size=count)
        starts, lengths = self._host_meta
        bounds = ForwardBounds(1, self._num_positions, count, starts[: count + 1], lengths[:count])
        tables, cu_seqlens_q = self._row_blocks.index_select(0, rows), self._starts[: count + 1]
        meta = AttentionMetadata(inputs.slot_mapping, tables, cu_seqlens_q, self._lengths[:count], *bounds)
        return EncoderInput(self._kv.layers, meta)

    def _slot_of(self, request: Request) -> int:
        key = request.tenant, request.cache_salt  # which covers the content
        slot = self._cached.pop(key, None)
        if slot is None:
            in_use = set(self._row_slots.tolist())
            slot = self._cached.pop(next(key for key, slot in self._cached.items() if slot not in in_use))
            self._cached[slot] = slot
            self._encode(request, slot)
            del self._cached[slot]
        self._cached[key] = slot
        return slot

    def _encode(self, request: Request, slot: int) -> None:
        assert request.inputs is not None
        audio = request.inputs["audio"]
        extracted = self._features(audio, sampling_rate=SAMPLING_RATE, return_tensors="np")["input_features"][0]
        features = torch.from_numpy(np.ascontiguousarray(extracted, np.float32)).to(self._positions.device)
        self._model.encode(features, self._positions + slot * self._slot_tokens, self._kv.layers)
        self.num_encoded += 1
