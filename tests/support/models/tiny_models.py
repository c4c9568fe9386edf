"""Small random models of many architectures, made on the spot, and the tokens that transformers generates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from tidewheel.batch import Int32Array

VOCAB_SIZE = 384
CONTEXT = 256
COMMON = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT, "eos_token_id": None, "bos_token_id": None}
SHAPE = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}
# In float32, rounding moves the logits of these models by about 1e-6: a token that is better by this is the best on
# every processor.
MARGIN = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def llama(**changes: object) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes}))


def mistral(**changes: object) -> PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**SHAPE, "sliding_window": 24, **changes}))


def qwen2(**changes: object) -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**SHAPE, **changes}))


def qwen3(**changes: object) -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SHAPE, "head_dim": 24, **changes}))


NATIVE: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-llama3-rope-tied": partial(llama, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-linear-rope-biases": partial(llama, rope_parameters=LINEAR_ROPE, attention_bias=True, mlp_bias=True),
    "mistral-window": mistral,
    "qwen2": qwen2,
    "qwen2-window": partial(qwen2, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3-tied": partial(qwen3, tie_word_embeddings=True),
    "qwen3-yarn": partial(qwen3, rope_parameters=YARN_ROPE, attention_bias=True),
}


def gemma2() -> PreTrainedModel:
    config = transformers.Gemma2Config(
        **SHAPE, head_dim=32, query_pre_attn_scalar=24, sliding_window=16, tie_word_embeddings=False,
        attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def gemma3() -> PreTrainedModel:
    config = transformers.Gemma3TextConfig(
        **SHAPE, head_dim=32, query_pre_attn_scalar=32, sliding_window=16, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, initializer_range=0.15,
        eos_token_id=None, bos_token_id=None, scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def gpt_neox() -> PreTrainedModel:
    shape = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**shape))


def opt() -> PreTrainedModel:
    config = transformers.OPTConfig(
        **COMMON, hidden_size=64, ffn_dim=112, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
        init_std=0.15, pad_token_id=1,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def phi3() -> PreTrainedModel:
    config = transformers.Phi3Config(**{**SHAPE, "pad_token_id": None, "sliding_window": 24})
    return transformers.Phi3ForCausalLM(config)


def stablelm() -> PreTrainedModel:
    return transformers.StableLmForCausalLM(transformers.StableLmConfig(**SHAPE, partial_rotary_factor=0.5))


def granite() -> PreTrainedModel:
    config = transformers.GraniteConfig(
        **SHAPE, attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.0, embedding_multiplier=1.5
    )
    return transformers.GraniteForCausalLM(config)


def save(make: Callable[[], PreTrainedModel], folder: Path, *, shard_size: str = "1GB") -> PreTrainedModel:
    """Save random weights, biases and norms included, as safetensors; return the model in float32."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.set_attn_implementation("eager")
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()


def save_byte_llama(folder: Path, **changes: object) -> PreTrainedModel:
    """Save a Llama whose token ids are bytes, with its tokenizer; greedy by default, ids 250 and 251 end a text."""
    model = save(lambda: llama(vocab_size=256, **changes), folder)
    save_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": [250, 251]}))
    return model


def save_byte_tokenizer(folder: Path, pairs: Sequence[str] = ()) -> None:
    """Save a tokenizer with a token for each byte and, from 256 on, for each of `pairs` of characters."""
    vocab = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *pairs]
    merges = [(first, second) for first, second in pairs]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def prompts(count: int, shortest: int, longest: int, *, seed: int = 0) -> list[Int32Array]:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(shortest, longest + 1, count)
    return [generator.integers(0, VOCAB_SIZE, length, dtype=np.int32) for length in lengths]


class Greedy(NamedTuple):
    tokens: list[int]
    margin: float  # by which the logit of each token exceeds every other, at least


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Int32Array, num_tokens: int) -> Greedy:
    """Return what `generate` of transformers answers to one prompt."""
    config = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = torch.from_numpy(prompt).long().unsqueeze(0).to(model.device)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    best = torch.cat(answer.logits).float().topk(2).values
    return Greedy(answer.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min()))


def transformers_tokens(
    model: PreTrainedModel, prompts: Sequence[Int32Array], num_tokens: int, *, margin: float = MARGIN
) -> list[list[int]]:
    """Return the greedy tokens of transformers for each prompt alone, all of them clear by the margin."""
    answers = [greedy(model, prompt, num_tokens) for prompt in prompts]
    assert min(answer.margin for answer in answers) >= margin, "rounding may decide here: choose other prompts"
    return [answer.tokens for answer in answers]


def clear_prompts(
    model: PreTrainedModel, candidates: Sequence[Int32Array], count: int, num_tokens: int
) -> tuple[list[Int32Array], list[list[int]]]:
    """Return the first prompts with clear answers, and the greedy tokens of transformers for them."""
    answers = [(prompt, greedy(model, prompt, num_tokens)) for prompt in candidates]
    clear = [(prompt, answer.tokens) for prompt, answer in answers if answer.margin >= MARGIN][:count]
    assert len(clear) == count, "too few candidates"
    return [prompt for prompt, _ in clear], [tokens for _, tokens in clear]
