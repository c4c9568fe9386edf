"""vLLM's engine arguments: what each means here. The names are those of vLLM 0.2.7 to 0.33.0, beside the parameters
that Triton's vLLM backend reads from `config.pbtxt`.

An argument is honoured, has no effect here, or asks for something that is not offered. An option of a feature that is
not in use has no effect.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Literal, NamedTuple

from tidewheel.errors import ConfigError
from tidewheel.sampling import MAX_LOGPROBS

log = logging.getLogger(__name__)

# Honoured: our setting by vLLM's name.
ENTRY_ARGUMENTS = frozenset({"REPORT_CUSTOM_METRICS", "otlp_traces_endpoint"})  # of an entry, not of its engine
_SAME_NAME = """
    model tokenizer dtype quantization kv_cache_dtype device load_format seed max_model_len block_size
    gpu_memory_utilization revision download_dir enable_prefix_caching enforce_eager async_scheduling
    scheduling_policy swap_space preemption_mode max_num_seqs max_num_batched_tokens long_prefill_token_threshold
    max_logprobs generation_config override_generation_config served_model_name disable_log_stats
"""
HONOURED: Mapping[str, str] = {
    **{name: name for name in (*_SAME_NAME.split(), *sorted(ENTRY_ARGUMENTS))},
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory_mb",
    "kv_offloading_size": "swap_space",
}

# Our value by vLLM's. None: as if absent.
_VALUES: Mapping[str, Mapping[object, object]] = {
    "dtype": {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "scheduling_policy": {"fcfs": "fifo"},
    "load_format": dict.fromkeys(("fastsafetensors", "instanttensor", "runai_streamer"), "safetensors"),
    "max_model_len": {-1: "auto"},
    "max_logprobs": {-1: MAX_LOGPROBS},
    "long_prefill_token_threshold": {0: None},
}

# No effect: the reason, and names.
_WITHOUT_EFFECT = {
    "an option of LoRA or of prompt adapters": """
        max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_lora_bias
        enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras
        max_lora_cls_labels lora_extra_vocab_size long_lora_scaling_factors max_prompt_adapters
        max_prompt_adapter_token
    """,
    "an option of speculative decoding": """
        speculative_model_quantization speculative_draft_tensor_parallel_size speculative_disable_mqa_scorer
        speculative_max_model_len speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min
        spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold
        typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding
        per_request_spec_decode_metrics
    """,
    "an option of serving on several devices": """
        distributed_executor_backend worker_use_ray engine_use_ray ray_workers_use_nsight master_addr master_port
        node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds max_parallel_loading_workers
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
        data_parallel_multi_port_external_lb data_parallel_backend dp_sync_interval
        disable_nccl_for_dp_synchronization dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size enable_expert_parallel enable_ep_weight_filter enable_elastic_ep
        elastic_ep_max_dp_size all2all_backend eplb_config enable_eplb expert_placement_strategy
        num_redundant_experts eplb_window_size eplb_step_interval eplb_log_balancedness enable_hc_sp enable_dbo
        ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold enable_batch_sharded_sampling
        disable_custom_all_reduce enable_shm_tensor_arena enable_nccl_comm_suspend _api_process_count
        _api_process_rank
    """,
    "an option for images, video and audio": """
        limit_mm_per_prompt language_model_only enable_mm_embeds interleave_mm_strings media_io_kwargs
        mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_hasher_algorithm
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin mm_tensor_ipc mm_ipc_gpu_memory_gb mm_device_do_normalize skip_mm_profiling
        video_pruning_rate video_pruning_method enable_mm_processor_stats disable_chunked_mm_input
        disable_mm_preprocessor_cache enable_multimodal_encoder_data_parallel allowed_local_media_path
        allowed_media_domains ec_manager_config image_input_type image_token_id image_input_shape image_feature_size
    """,
    "the engine has its own kernels and graphs": """
        compilation_config optimization_level performance_mode monokernel cuda_graph_sizes cudagraph_capture_sizes
        max_cudagraph_capture_size max_seq_len_to_capture max_context_len_to_capture attention_backend
        attention_config disable_cascade_attn kernel_config moe_backend linear_backend ir_op_priority
        sparse_indexer_topk_backend enable_flashinfer_autotune enable_bf16x3_router_gemm kv_sharing_fast_prefill
        use_fp64_gumbel jit_monitor_mode jit_monitor_verbose numa_bind numa_bind_nodes numa_bind_cpus
        enable_cumem_allocator
    """,
    "prompts are always chunked, and the scheduler is another": """
        enable_chunked_prefill max_num_partial_prefills max_long_partial_prefills
        long_prefill_token_threshold_adaptive max_num_active_seqs max_num_scheduled_tokens prefill_schedule_interval
        scheduler_reserve_full_isl scheduler_delay_factor num_scheduler_steps multi_step_stream_outputs
        stream_interval disable_async_output_proc num_lookahead_slots max_paddings
    """,
    "the KV cache is laid out in another way": """
        use_v2_block_manager prefix_caching_hash_algo prefix_match_unit prefix_cache_retention_interval watermark
        disable_hybrid_kv_cache_manager swa_bounded_replay kv_offloading_backend kv_cache_metrics
        kv_cache_metrics_sample
    """,
    "scales of the KV cache are always measured at load": "calculate_kv_scales",
    "Mamba and linear attention are not served": """
        mamba_config mamba_backend mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds replayssm_buffer_len use_replayssm gdn_prefill_backend kda_prefill_backend
        kda_decode_backend engram_config
    """,
    "model files are read in one way": """
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location code_revision model_impl
        tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers
    """,
    "grammars are llguidance's and named by requests; reasoning stays in the text, but for the gateway": """
        guided_decoding_backend guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
        guided_decoding_disable_additional_properties structured_outputs_config reasoning_parser reasoning_config
        enable_reasoning
    """,
    "logs, traces and figures have settings of their own here": """
        disable_log_requests enable_log_requests max_log_len logging_config log_level log_config_file
        aggregate_engine_logging enable_logging_iteration_details show_hidden_metrics_for_version
        custom_histogram_buckets cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing
        collect_detailed_traces profiler_config
    """,
    "the engine is always watched, and started again after a crash": """
        ENABLE_VLLM_HEALTH_CHECK watchdog_config enable_fault_tolerance fault_tolerance_config shutdown_timeout
        fail_on_environ_validation
    """,
    "an option of a feature that is not in use": """
        allow_deprecated_quantization cpu_offload_params offload_backend offload_num_in_group offload_prefetch_step
        offload_params sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        override_neuron_config
    """,
}

_REMOVE = "remove it"

# Not offered: what, what to do, and names with the values that do not ask for it, beside null and nothing.
_NOT_OFFERED = (
    ("LoRA is not offered", _REMOVE, "enable_lora=false default_mm_loras qlora_adapter_name_or_path"),
    ("a prompt adapter is not offered", _REMOVE, "enable_prompt_adapter=false"),
    (
        "one device serves one engine",
        "set it to 1, and run a server for each device",
        """
            tensor_parallel_size=1 pipeline_parallel_size=1 data_parallel_size=1 prefill_context_parallel_size=1
            decode_context_parallel_size=1 nnodes=1
        """,
    ),
    ("the device is not chosen here", "set CUDA_VISIBLE_DEVICES for the server", "device_ids GPU_DEVICE_IDS"),
    (
        "quantised files are not served",
        "serve a model of float32, bfloat16 or float16, with quantization fp8 if it shall have 8 bits",
        "quantization_config quantization_param_path",
    ),
    ("all layers keep their keys and values alike", _REMOVE, "kv_cache_dtype_skip_layers"),
    (
        "speculative decoding is not offered",
        _REMOVE,
        "speculative_config speculative_model num_speculative_tokens spec_method spec_model spec_tokens",
    ),
    ("diffusion models are not served", _REMOVE, "diffusion_config"),
    (
        "embeddings, scores and classes are not offered: the engine generates text",
        _REMOVE,
        "task=auto|generate runner=auto|generate convert=auto pooler_config override_pooler_config",
    ),
    ("prompts are text or token ids, not embeddings", _REMOVE, "enable_prompt_embeds=false"),
    ("code of a model folder is never run", "set it to false", "trust_remote_code=false"),
    (
        "code of others is never run in the engine",
        _REMOVE,
        """
            logits_processors logits_processor_pattern io_processor_plugin reasoning_parser_plugin
            scheduler_cls=vllm.core.scheduler.Scheduler worker_cls=auto worker_extension_cls model_class_overrides
            additional_config
        """,
    ),
    (
        "overrides of the model's configuration are not offered",
        "edit config.json in the model folder",
        "hf_overrides hf_config_path rope_scaling rope_theta override_attention_dtype disable_sliding_window=false",
    ),
    ("config.json is read in Hugging Face's form alone", "set it to auto", "config_format=auto|hf"),
    ("only tokenizer.json is read, by the tokenizers package", "set it to auto", "tokenizer_mode=auto|hf"),
    ("an entry needs its tokenizer", "set it to false", "skip_tokenizer_init=false"),
    (
        "the tokenizer is the model's, of the same revision",
        "remove it, or set tokenizer to a folder",
        "tokenizer_revision",
    ),
    ("a setting is no place for a token", "set the environment variable HF_TOKEN", "hf_token=true|false"),
    ("the weights are those of model", _REMOVE, "model_weights"),
    ("weights stay on the device", "set it to 0", "cpu_offload_gb=0 offload_group_size=0"),
    (
        "prefill and decode in different engines is not offered",
        _REMOVE,
        "kv_transfer_config ec_transfer_config kv_events_config",
    ),
    ("sleep mode is not offered", "unload the model through Triton", "enable_sleep_mode=false"),
    ("new weights come by a new model folder", _REMOVE, "weight_transfer_config"),
    (
        "log-probabilities are those of the model, before temperature and penalties",
        "set it to raw_logprobs",
        "logprobs_mode=raw_logprobs",
    ),
    ("text is not watermarked", _REMOVE, "watermark_config"),
    (
        "the answer has tokens and text alone",
        _REMOVE,
        "enable_return_routed_experts=false return_sampling_mask=false aux_output_config",
    ),
    ("tokens come from the model, not from a trace", _REMOVE, "enable_trace_replay=false"),
    ("text is always detokenised", _REMOVE, "tokens_only=false"),
    ("the limit of waiting requests has another name", "set max_waiting_requests", "max_num_queued_reqs"),
    ("the limit of waiting tokens has another name", "set max_waiting_tokens", "max_num_queued_tokens"),
)


class NotOffered(NamedTuple):
    reason: str
    advice: str
    allowed: tuple[object, ...]  # beside nothing


class Translation(NamedTuple):
    settings: Mapping[str, object]  # by our names; unknown ones as they were
    without_effect: Mapping[str, str]  # reason by vLLM's name


Kind = Literal["honoured", "without effect", "not offered"]


def plain(value: object) -> object:
    """Return what a text of `config.pbtxt` means. None: nothing."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("none", "null"):
            return None
        try:
            value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except (ValueError, RecursionError):
            value = text
    return None if value in ("", {}, []) else value


WITHOUT_EFFECT: Mapping[str, str] = {
    name: reason for reason, names in _WITHOUT_EFFECT.items() for name in names.split()
}
NOT_OFFERED: Mapping[str, NotOffered] = {
    name: NotOffered(reason, advice, tuple(plain(value) for value in values.split("|") if value))
    for reason, advice, names in _NOT_OFFERED
    for name, _, values in (item.partition("=") for item in names.split())
}
ARGUMENTS = frozenset((*HONOURED, *WITHOUT_EFFECT, *NOT_OFFERED))


def kind_of(name: str) -> Kind | None:
    """Return None for a name that vLLM does not have."""
    if name in HONOURED:
        return "honoured"
    return "without effect" if name in WITHOUT_EFFECT else "not offered" if name in NOT_OFFERED else None


def refusal(name: str, value: object) -> str | None:
    """Return what is wrong with the value of an argument that is not offered, if it asks for it."""
    argument, asked = NOT_OFFERED[name], plain(value)
    if asked is None or any(asked == allowed for allowed in argument.allowed):
        return None
    shown = "set" if name == "hf_token" else repr(value)
    return f"{name} is {shown}: {argument.reason}; {argument.advice}"


def translate(settings: Mapping[str, object]) -> Translation:
    """Replace vLLM's names and values by ours, and leave out what is null or has no effect, which a line of the log
    names. Raise `ConfigError`.
    """
    translated: dict[str, object] = {}
    without_effect: dict[str, str] = {}
    origin: dict[str, str] = {}
    for name, value in settings.items():
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
            continue
        if name in WITHOUT_EFFECT:
            without_effect[name] = WITHOUT_EFFECT[name]
            continue
        if name in NOT_OFFERED:
            follows_model = name == "tokenizer_revision" and value == settings.get("revision")
            if not follows_model and (problem := refusal(name, value)):
                raise ConfigError(problem)
            without_effect[name] = NOT_OFFERED[name].reason
            continue
        ours, value = HONOURED.get(name, name), _translate_value(name, value)
        if value is None:
            continue
        if ours in origin and value != translated[ours]:
            raise ConfigError(f"{origin[ours]} and {name} are one setting here: keep one")
        translated[ours], origin[ours] = value, name
    if without_effect:
        log.info("no effect here: %s", ", ".join(sorted(without_effect)))
    return Translation(translated, without_effect)


def _translate_value(name: str, value: object) -> object:
    if name == "kv_cache_memory_bytes":
        number = plain(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 1 << 20 <= number < 1 << 63:
            raise ConfigError(f"{name} is {value!r}: it must be a number of bytes, {1 << 20} (1 MiB) or more")
        return int(number) >> 20
    if name == "served_model_name" and isinstance(value, list):
        return value[0] if value else None
    values, known = _VALUES.get(name, {}), plain(value)
    return values[known] if isinstance(known, str | int) and known in values else value
