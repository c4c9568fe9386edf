"""A small random Whisper of two seconds of audio, with made tokens, and what transformers generates for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from support.models import tiny_models
from tidewheel.one_shot.signature import Array

SECONDS = 2
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>")
NO_TIMESTAMPS = "<|notimestamps|>"
FIRST_SPECIAL = 256
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, NO_TIMES = range(FIRST_SPECIAL, FIRST_SPECIAL + 7)
VOCAB_SIZE = FIRST_SPECIAL + 8
PROMPT = (START, ENGLISH, TRANSCRIBE, NO_TIMES)
NUM_TOKENS = 12


def make() -> transformers.PreTrainedModel:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB_SIZE, num_mel_bins=80, d_model=32, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=96,
        max_source_positions=50 * SECONDS, max_target_positions=64, init_std=0.3, decoder_start_token_id=START,
        eos_token_id=END, bos_token_id=END, pad_token_id=END, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():  # else a token repeats itself
        model.model.decoder.embed_positions.weight.mul_(5)
    return model


def save(folder: Path) -> transformers.PreTrainedModel:
    """Save weights, generation rules and the tokenizer, whose ids below 256 are bytes; return the model."""
    model = tiny_models.save(make, folder)
    rules: dict[str, Any] = {
        "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}, "no_timestamps_token_id": NO_TIMES,
        "suppress_tokens": [7, 163, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, NO_TIMES, VOCAB_SIZE - 1],
        "begin_suppress_tokens": [170, END], "max_length": 64,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(rules))
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, NO_TIMESTAMPS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def audio(seed: int, seconds: float = SECONDS) -> Array:
    """Return float32 samples at 16 kHz: a few tones that change, with noise."""
    generator = np.random.default_rng(seed)
    times = np.arange(int(16_000 * seconds)) / 16_000
    pitches = generator.uniform(80, 3000, 6)
    loudness = generator.uniform(0, 1, (6, 8)).repeat(len(times) // 8 + 1, axis=1)[:, : len(times)]
    tones = (loudness * np.sin(2 * np.pi * pitches[:, None] * times)).sum(0)
    return (tones / 8 + generator.normal(0, 0.01, len(times))).clip(-1, 1).astype(np.float32)


@torch.inference_mode()
def detect_language(model: transformers.PreTrainedModel, samples: Array) -> tiny_models.Greedy:
    """Return the token of transformers' `detect_language`, and the margin of its choice."""
    extract = transformers.WhisperFeatureExtractor(chunk_length=SECONDS)
    features = extract(samples, sampling_rate=16_000, return_tensors="pt").input_features
    logits = model(input_features=features, decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
    margin = float((logits[ENGLISH] - logits[GERMAN]).abs())
    return tiny_models.Greedy(model.detect_language(input_features=features).tolist(), margin)


@torch.inference_mode()
def transcribe(
    model: transformers.PreTrainedModel, samples: Array, num_tokens: int = NUM_TOKENS, **language: str
) -> tiny_models.Greedy:
    """Return the tokens of transformers' `generate`, without the prompt, and the least margin of a choice."""
    extract = transformers.WhisperFeatureExtractor(chunk_length=SECONDS)
    features = extract(samples, sampling_rate=16_000, return_tensors="pt").input_features
    answer = model.generate(
        features, **({"language": "en", "task": "transcribe"} | language), max_new_tokens=num_tokens, do_sample=False,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    best = torch.cat(answer.scores).float().topk(2).values
    tokens = answer.sequences[0].tolist()
    begin = next((i for i, token in enumerate(tokens) if token <= END), len(tokens))  # perhaps behind the prompt
    return tiny_models.Greedy(tokens[begin : begin + len(answer.scores)], float((best[:, 0] - best[:, 1]).min()))
