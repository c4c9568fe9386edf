"""Small random encoders in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green", "blue", "cat", "dog"]


def save(folder: Path, labels: int = 0, **config: Any) -> Path:
    """Save a random BERT of width 8 and 16 positions, with classes if there are labels, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    if labels:
        config["id2label"] = {index: f"class {index}" for index in range(labels)}
    settings = BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, pad_token_id=0, **sizes, **config)
    model = BertForSequenceClassification(settings) if labels else BertModel(settings)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.5)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special).save_pretrained(folder)
    return folder
