"""A small Whisper of random weights that hears two seconds and writes English, as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from common.random_model import save_tokenizer

VOCAB, SECONDS, NUM_TOKENS = 512, 2, 32
START, END = 1, 2


def save(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=128, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=512,
        decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=512, max_source_positions=50 * SECONDS,
        max_target_positions=NUM_TOKENS, decoder_start_token_id=START, eos_token_id=END, bos_token_id=START,
        pad_token_id=END, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    rules = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "suppress_tokens": [END]}
    (folder / "generation_config.json").write_text(json.dumps(rules))
    save_tokenizer(folder, VOCAB)
    return folder


def save_audio(file: Path) -> Path:
    """Write noise as the tensor of a request."""
    samples = np.random.default_rng(0).normal(0.0, 0.1, 16_000 * SECONDS).clip(-1, 1)
    np.savez(file, audio=samples.astype(np.float32))
    return file
