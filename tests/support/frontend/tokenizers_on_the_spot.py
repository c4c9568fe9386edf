"""Tokenizers of the families in use, trained on the spot on a few sentences."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tidewheel.frontend.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Databases are wonderful things: they don't forget what they were told!",
    "naïve café, übergröße, 日本語のテキスト, 🎉 emoji 👩‍👩‍👧 families, ελληνικά, العربية",
    "  indented code:\n\tif x == 1:\n\t\treturn  None\n",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level_bpe() -> tokenizers.Tokenizer:
    """Train a tokenizer like those of GPT-2, Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return backend


def byte_fallback_bpe() -> tokenizers.Tokenizer:
    """Train a tokenizer like Llama 2 and Mistral: SentencePiece pieces, and bytes for what the vocabulary lacks."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=150, limit_alphabet=60, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator(TEXT, trainer)
    state = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in state["vocab"] if piece not in SPECIAL]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in state["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return backend


def word_piece() -> tokenizers.Tokenizer:
    """Train a tokenizer like that of BERT."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return backend


def unigram() -> tokenizers.Tokenizer:
    """Train a tokenizer like those of T5 and XLNet."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    return backend


BACKENDS = {
    "byte-level BPE": byte_level_bpe,
    "byte-fallback BPE": byte_fallback_bpe,
    "WordPiece": word_piece,
    "Unigram": unigram,
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_tokenizer(family: str = "byte-level BPE") -> Tokenizer:
    backend = BACKENDS[family]()
    return Tokenizer(backend, vocab_size=backend.get_vocab_size(), named_tokens=NAMED)
