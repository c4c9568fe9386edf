"""Baseline for the engine: transformers `generate` over a batch, greedy.

Rows are padded on the left and share a KV cache; each is computed until the last ends.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from tidewheel.config import EngineConfig
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.loader import open_checkpoint
from tidewheel.models.model_folder import checkpoint_dtype, gguf_file_of, read_config, resolve_folder
from tidewheel.models.quantized_checkpoint import quantization_layout
from tidewheel.models.weight_source import check_names, uncounted
from tidewheel.parameters import MAX_INT32
from tidewheel.runner.device import device_name, limit_threads, resolve_device, resolve_dtype
from tidewheel.scheduler.admission import check_lengths

logger = logging.getLogger(__name__)

_PAD = 0  # any id: the mask hides it


class Row(NamedTuple):
    token_ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool = False


class RowOutput(NamedTuple):
    token_ids: list[int]  # includes an end-of-sequence token
    finish_reason: str  # stop or length
    text: str
    num_input_tokens: int


class Generator:
    """Transformers model and its tokenizer. Not thread-safe."""

    def __init__(self, model: Any, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call] # the folder's may sample, or penalise
        self._model = model
        self._tokenizer = tokenizer
        self._eos = torch.tensor(sorted(eos_token_ids), device=model.device)
        self._max_model_len = int(getattr(model.config, "max_position_embeddings", 0)) or MAX_INT32

    @classmethod
    def load(cls, config: EngineConfig) -> "Generator":
        """Load model and tokenizer. Raise `ConfigError`."""
        device = resolve_device(config)
        folder = resolve_folder(config.model, config.revision, config.download_dir)
        fields = read_config(folder)
        dtype = resolve_dtype(config.dtype, checkpoint_dtype(fields), device)
        model = _load_model(folder, fields, dtype).to(device).eval()
        weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if device.type == "cpu" and config.num_threads is None:
            limit_threads(weights_bytes)
        logger.info("transformers %s, %d MiB of weights, %s, %s",
                    type(model).__name__, weights_bytes >> 20, dtype, device_name(device))  # fmt: skip
        tokenizer = Tokenizer.load(folder, vocab_size=model.config.vocab_size)
        eos = GenerationDefaults.load(folder).eos_token_ids | tokenizer.eos_token_ids
        return cls(model, tokenizer, eos)

    def encode(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text).tolist()  # type: ignore[no-any-return]

    def check(self, row: Row) -> None:
        vocab_size = self._tokenizer.vocab_size
        check_lengths(len(row.token_ids), row.max_tokens, 0, self._max_model_len)
        wrong = next((token for token in row.token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"input_ids has the token id {wrong}: ids are 0 to {vocab_size - 1}")

    @torch.inference_mode()
    def generate(self, rows: Sequence[Row]) -> list[RowOutput]:
        """Return outputs in row order. Rows must have passed `check`."""
        if not rows:
            return []
        device, width = self._model.device, max(len(row.token_ids) for row in rows)
        padding = [width - len(row.token_ids) for row in rows]
        ids = [[_PAD] * pad + list(row.token_ids) for pad, row in zip(padding, rows, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        output = self._model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            do_sample=False,
            max_new_tokens=max(row.max_tokens for row in rows),
            eos_token_id=None,  # `RowEnds` decides
            pad_token_id=_PAD,
            use_cache=True,
            stopping_criteria=StoppingCriteriaList([RowEnds(rows, width, self._eos)]),
        )
        return [self._output(row, new) for row, new in zip(rows, output[:, width:].tolist(), strict=True)]

    def _output(self, row: Row, tokens: list[int]) -> RowOutput:
        tokens = tokens[: row.max_tokens]
        stops = () if row.ignore_eos else self._eos.tolist()
        end = next((index for index, token in enumerate(tokens) if token in stops), None)
        if end is not None:
            tokens = tokens[: end + 1]
        return RowOutput(
            token_ids=tokens,
            finish_reason="length" if end is None else "stop",
            text=self._tokenizer.decode(tokens),
            num_input_tokens=len(row.token_ids),
        )


def _load_model(folder: Path, fields: ConfigFields, dtype: torch.dtype) -> Any:
    """Load through transformers, but with quantised weights as floats. Raise `ConfigError`."""
    if gguf_file_of(folder) is None and quantization_layout(folder, fields) is None:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    source = open_checkpoint(folder, fields, tensors)
    check_names(source, {name: tuple(each.shape) for name, each in tensors.items()}, lambda _name: False, folder)
    source.copy(tensors, uncounted)
    return model


class RowEnds(StoppingCriteria):
    """Stopping criterion per row: `max_tokens`, or an end-of-sequence token unless ignored."""

    def __init__(self, rows: Sequence[Row], width: int, eos: torch.Tensor) -> None:
        """`width`: length of the padded prompts; `eos`: [num_eos]."""
        self._eos = eos
        self._ends = torch.tensor([width + row.max_tokens for row in rows], device=eos.device)
        self._heeds_eos = torch.tensor([not row.ignore_eos for row in rows], device=eos.device)

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """Return the rows that are finished, [num_rows] bool."""
        del scores, kwargs
        is_eos = torch.isin(input_ids[:, -1], self._eos) & self._heeds_eos
        return is_eos | (input_ids.shape[1] >= self._ends)
