"""Valid inputs of each target, from which mutations start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from support.engine.engine_clients import request
from support.engine.fake_engine import TEMPLATE
from support.frontend.tokenizers_on_the_spot import NAMED, SPECIAL, byte_fallback_bpe, byte_level_bpe
from support.fuzz.gguf_bytes import gguf_bytes
from support.models.gguf_files import byte_vocabulary, vocabulary_of
from tidewheel.engine.messages import (
    PROTOCOL,
    Cancel,
    CancelRequest,
    Drain,
    Hello,
    ListRequests,
    Ping,
)

_SAMPLING: dict[str, Any] = {
    "max_tokens": 8, "min_tokens": 1, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7,
    "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop": ["\n", "###"], "n": 2,
    "bad_words": ["dog"], "stop_token_ids": [5], "logit_bias": {"5": -1.5, "7": 100}, "logprobs": 3, "priority": 2,
    "tenant": "a", "cache_salt": "b", "deadline_ms": 1e4, "soft_deadline_ms": 1e3,
    "response_format": {"type": "text"}, "guided_json": {"type": "object"},
    "structured_outputs": {"json": None, "disable_fallback": True},
    "best_of": 2, "do_sample": None,
}  # fmt: skip
_MESSAGES = [
    {"role": "system", "content": "Be brief.", "name": "boss"},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]},
]
_REQUEST: dict[str, Any] = {
    "text_input": "Hello", "stream": True, "exclude_input_in_output": True, "accumulate_tokens": True,
    "return_logprobs": True, "return_token_ids": True, "max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["a"],
    "stop_token_ids": [5], "embedding_bias_words": ["a"], "embedding_bias_weights": [1.0],
    "return_log_probs": True, "parameters": {"top_k": 4, "top_p": "0.5", "ignore_eos": True},
}  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "model": "weights", "dtype": "half", "max_num_seqs": 8, "block_size": 16, "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": True, "tenants": {"a": {"weight": 2, "max_priority": 2}, "*": {"each": True}},
    "override_generation_config": {"temperature": 0.5, "max_new_tokens": 5}, "swap_space": "4",
    "kv_cache_memory_bytes": 1 << 24, "max_model_len": "auto", "served_model_name": ["a", "b"], "max_lora_rank": 8,
    "default_max_tokens": "context", "max_request_s": 60, "trust_remote_code": False,
    "long_prefill_token_threshold": 0,
    "tensor_parallel_size": 1,
}  # fmt: skip
_PBTXT = """# An entry.
backend: "%s"
max_batch_size: 0
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true } ]
output [ { name: "text_output", data_type: TYPE_STRING, dims: [ -1 ] } ]
parameters { key: "model" value { string_value: "weights" } }
parameters: { key: "max_num_seqs" value: { string_value: "8" } }
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 priority_levels: 2 }
version_policy: { specific: { versions: [ 1 ] } }
"""
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16", "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 16, "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"], "eos_token_id": [0, 2],
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
    },
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_GENERATION = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "eos_token_id": 2}
_INDEX = {"metadata": {"total_size": 8}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


_GGUF: dict[str, Any] = {
    "general.architecture": "llama", "general.alignment": 32, "llama.block_count": 1, "llama.context_length": 64,
    "llama.embedding_length": 32, "llama.feed_forward_length": 256, "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5, "llama.rope.dimension_count": 16, "llama.attention.sliding_window": 16,
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 32, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
}  # fmt: skip
_GGUF_TENSORS = {  # of many types, rows first
    "token_embd.weight": [8, [260, 32]], "output_norm.weight": [0, [32]], "rope_freqs.weight": [0, [8]],
    "blk.0.attn_norm.weight": [0, [32]], "blk.0.attn_q.weight": [3, [32, 32]], "blk.0.attn_q.bias": [0, [32]],
    "blk.0.attn_k.weight": [6, [16, 32]], "blk.0.attn_v.weight": [1, [16, 32]],
    "blk.0.attn_output.weight": [30, [32, 32]], "blk.0.ffn_norm.weight": [0, [32]],
    "blk.0.ffn_gate.weight": [7, [256, 32]], "blk.0.ffn_up.weight": [2, [256, 32]],
    "blk.0.ffn_down.weight": [12, [32, 256]],
}  # fmt: skip
_QWEN = {key.replace("llama", "qwen3"): value for key, value in _GGUF.items() if "scaling" not in key}
_GGUF_VALUES: list[dict[str, dict[str, Any]]] = [
    {
        "metadata": {**_QWEN, "general.architecture": "qwen3", **byte_vocabulary(260)},
        "tensors": {name: value for name, value in _GGUF_TENSORS.items() if "freqs" not in name},
    },
    {
        "metadata": {**_GGUF, **vocabulary_of(byte_fallback_bpe(), "llama", SPECIAL)},
        "tensors": _GGUF_TENSORS,
    },
]


def _folder(config: object) -> bytes:
    return _json(
        {"config.json": config, "generation_config.json": _GENERATION, "model.safetensors.index.json": _INDEX,
         "one.safetensors": "\x02\0\0\0\0\0\0\0{}"}
    )  # fmt: skip


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _safetensors() -> bytes:
    header = _json(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
            "empty": {"dtype": "F16", "shape": [0, 4], "data_offsets": [22, 22]},
        }
    )
    return len(header).to_bytes(8, "little") + header + bytes(22)


def _messages(*messages: object) -> bytes:
    return msgspec.msgpack.encode(messages)


def _tokenizer(**changes: object) -> bytes:
    config = json.loads(byte_level_bpe().to_str()) | changes
    return _json({"tokenizer.json": config, "tokenizer_config.json": NAMED | {"chat_template": TEMPLATE}})


_AFFIXES = {
    "normalizer": {"type": "Sequence", "normalizers": [
        {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Prepend", "prepend": "_"}, {"type": "Strip", "strip_left": True, "strip_right": False},
    ]},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False},
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]},
    "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
}  # fmt: skip

SEEDS: dict[str, Sequence[bytes]] = {
    "sampling_parameters": [_json(_SAMPLING), _json({"session_id": "s", "session_ttl_s": 5, "close_session": False})],
    "messages": [_json(_MESSAGES)],
    "request": [
        _json(_REQUEST),
        _json({"input_ids": [5, 6], "random_seed": 4, "n": 2, "logit_bias": '{"5": 1}', "stream": False}),
    ],
    "settings": [_json(_SETTINGS), _json({"engine_of": "b", "num_sender_threads": 2})],
    "config_pbtxt": [(_PBTXT % backend).encode() for backend in ("tidewheel", "vllm", "tensorrtllm")],
    "safetensors": [_safetensors()],
    "model_folder": [
        _folder(_CONFIG),
        _folder(_CONFIG | {"architectures": ["LlamaForCausalLM"], "rope_parameters": _LLAMA3}),
        _folder(_GPT2),
    ],
    "gguf": [gguf_bytes(**value) for value in _GGUF_VALUES],
    "gguf_values": [_json(value) for value in _GGUF_VALUES],
    "tokenizer": [_tokenizer(), _tokenizer(**_AFFIXES)],
    "chat_template": [
        TEMPLATE.encode(),
        b"{%- set ns = namespace(a=1) -%}{% macro m(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ m(messages) }}"
        b"{% if messages[0].role not in ['user'] %}{{ raise_exception('no ' ~ messages[0]['role']) }}{% endif %}"
        b"{% generation %}{{ strftime_now('%d %b') }}{{ bos_token + 'a' * 3 }}{% endgeneration %}"
        b"{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}"
        b"{{ '%s' % i }}{{ 'x'.join(['a']) }}{% endfor %}",
    ],
    "trace": [
        b"arrival,prompt_tokens,output_tokens,priority,tenant,session,prefix_group,prefix_tokens,deadline_s\n"
        b"0.5,10,5,1,a,s,g,4,2.5\n1.5,20,5,,,,,,\n",
        b'{"arrival": 0.5, "prompt_tokens": 10, "output_tokens": 5, "tenant": "a", "deadline_s": 3}\n'
        b'{"arrival": 0.7, "prompt_tokens": 10, "output_tokens": 5, "session": 4}\n',
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,12,0\n",
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,Chat,472,18,490,a\n4,b,1,0,1,c\n",
    ],
    "engine_messages": [
        _messages(
            request(1, 5, 6, 7, n=2, tenant="a", session_id="", cache_salt="x", deadline_ns=1 << 62),
            request(2, 5, 6, session_id="s", session_ttl_s=5.0, stop_token_ids=(3,), bad_words_ids=((1, 2),)),
            Ping({"a": 3}), Ping({"a": 3}), Cancel([(1, -1), (1, 1)]),
            request(4, session_id="s", close_session=True),
            request(5, session_id="s", pause_session=("search",)),
            Hello(PROTOCOL, "again", "", {"model": "m", "max_num_seqs": 4, "debug_invariants": True}, 1),
        ),
        _messages(request(1, 5), Drain(), request(2, 5)),
        _messages(request(1, 5, n=2, request_id="a"), ListRequests(1), CancelRequest(0, 1)),
    ],
}  # fmt: skip
