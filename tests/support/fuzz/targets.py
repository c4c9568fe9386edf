"""Readers of what others write, each as a function of bytes for a fuzzer.

A target passes if its reader ends, without an error or with one that is documented: `ConfigError`, or a
`TidewheelError` that blames the input. An error's message is one line that can be sent and logged.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np

from support.engine.fake_engine import make_info, write_model_folder
from support.frontend.local_encoder import LocalEncoder
from support.fuzz.engine_target import serve_messages
from support.fuzz.gguf_bytes import gguf_bytes
from support.fuzz.mutations import Form
from support.triton import fake_triton
from support.triton.fake_triton import InferenceRequest, Tensor
from tidewheel.adapter.repository_entry import ModelEntry, load_settings, resolve_settings
from tidewheel.adapter.tensors import INPUTS
from tidewheel.entries.checking import check
from tidewheel.entries.migration import migrate
from tidewheel.errors import ConfigError, InternalError, InvalidRequest, TidewheelError, printable
from tidewheel.frontend.chat import ChatTemplate, Conversation
from tidewheel.frontend.prompt_workers import TokenizerFolder
from tidewheel.frontend.request_reader import RequestReader
from tidewheel.frontend.settings import FrontendSettings, GenerationDefaults
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.workload.trace_files import read_trace

MAX_PROMPT_BYTES = 1 << 16
VOCAB_SIZE = 420
REFUSED = 1  # exit code of a child
MORE_MEMORY = 1 << 30  # bytes that a child may take
_DTYPES: dict[str, Any] = {
    "TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_UINT64": np.uint64,
    "TYPE_BOOL": np.bool_,
}  # fmt: skip
_CONVERSATION = [{"role": role, "content": "Hello"} for role in ("system", "user", "assistant", "user")]


class Target(NamedTuple):
    run: Callable[[bytes], object]
    form: Form = "json"

    def __call__(self, data: bytes) -> str:
        """Return the message of the documented error; empty without one. Raise what is not documented."""
        try:
            self.run(data)
        except (ConfigError, TidewheelError) as error:
            if isinstance(error, InternalError):
                raise
            return check_message(str(error) if isinstance(error, ConfigError) else printable(str(error)))
        return ""


def check_message(message: str) -> str:
    assert message, "an error without a message"
    assert message.isprintable(), f"not one line of text: {message[:500]!r}"
    return message


# --- requests --------------------------------------------------------------------------------------------------


@cache
def _reader() -> RequestReader:
    with _folder({}) as folder:
        vocab_size = write_model_folder(folder)
        return RequestReader(
            make_info(folder, vocab_size=vocab_size),
            Tokenizer.load(folder, vocab_size=vocab_size),
            LocalEncoder(TokenizerFolder(folder, vocab_size, MAX_PROMPT_BYTES)),
            FrontendSettings(default_max_tokens="context"),
            max_prompt_bytes=MAX_PROMPT_BYTES,
            defaults=GenerationDefaults.load(folder),
        )


def _read(request: InferenceRequest) -> None:
    sys.modules.setdefault("triton_python_backend_utils", fake_triton)  # the adapter imports it
    from tidewheel.adapter.tensors import read_request

    settings = FrontendSettings()
    read, _ = read_request(request, settings, decoupled=True, max_prompt_bytes=MAX_PROMPT_BYTES, arrival_ns=1)
    _reader().read(1, read)


def sampling_parameters(data: bytes) -> None:
    _read(InferenceRequest([_bytes("text_input", b"Hello"), _bytes("sampling_parameters", data)]))


def messages(data: bytes) -> None:
    _read(InferenceRequest([_bytes("messages", data)]))


def request(data: bytes) -> None:
    """Read tensors and request parameters, of the types that Triton lets through."""
    value = _object(data)
    tensors = [
        tensor for name, data_type in _types().items() if (tensor := _tensor(name, data_type, value.get(name)))
    ]
    parameters = value.get("parameters")
    scalars = {k: v for k, v in parameters.items() if _is_scalar(v)} if isinstance(parameters, dict) else {}
    _read(InferenceRequest(tensors, json.dumps(scalars)))


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**64)


@cache
def _types() -> dict[str, str]:
    return {spec.name: spec.data_type for spec in INPUTS}


def _bytes(name: str, data: bytes) -> Tensor:
    return Tensor(name, np.array([data], dtype=np.object_))


def _tensor(name: str, data_type: str, value: object) -> Tensor | None:
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if data_type == "TYPE_STRING":
        texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
        return Tensor(name, np.array([text.encode("utf-8", "surrogatepass") for text in texts], dtype=np.object_))
    try:
        with np.errstate(all="ignore"):
            return Tensor(name, np.array(items, dtype=np.float64).astype(_DTYPES[data_type]))
    except (TypeError, ValueError, OverflowError):
        return None


# --- settings --------------------------------------------------------------------------------------------------


def settings(data: bytes) -> None:
    """Read settings from `model.json`, then the same from the parameters of `config.pbtxt`."""
    with _folder({"1/model.json": data}) as folder:
        args = {"model_config": "{}", "model_repository": str(folder), "model_version": "1", "model_name": "a"}
        with contextlib.suppress(ConfigError):
            load_settings(args)
        parameters = {k: v if isinstance(v, str) else json.dumps(v) for k, v in _object(data).items()}
        entry = ModelEntry(name="a", folder=folder, version="1", parameters=parameters, model_json={})
        resolve_settings(entry)


def config_pbtxt(data: bytes) -> None:
    """Check and migrate a repository of one entry."""
    with _folder({"a/config.pbtxt": data, "a/1/model.json": b'{"model": "weights"}'}) as folder:
        check(folder, is_this_machine=False)
        migrate(folder)


# --- files of a model ------------------------------------------------------------------------------------------


def safetensors(data: bytes) -> None:
    """Read a file with all its tensors, as float32."""
    import torch

    from tidewheel.models.weight_source import SafetensorsFolder, uncounted

    with _folder({"model.safetensors": data}) as folder:
        source = SafetensorsFolder(folder)
        assert all(stored.begin + stored.num_bytes <= len(data) for stored in source.tensors.values())
        wanted = {name: torch.empty(stored.shape) for name, stored in source.tensors.items() if stored.num_bytes}
        source.copy(wanted, uncounted)


def model_folder(data: bytes) -> None:
    """Read the small files of a folder up to the tensors that the model would have."""
    from tidewheel.models.weight_source import SafetensorsFolder

    with _folder(_object(data)) as folder:
        _make_model(folder)
        SafetensorsFolder(folder)


def _make_model(folder: Path) -> None:
    import torch

    from tidewheel.models.architectures import cos_sin_table, native_traits, parse_config
    from tidewheel.models.decoder import Decoder
    from tidewheel.models.model_folder import checkpoint_dtype, read_config
    from tidewheel.models.transformers_model import transformers_config
    from tidewheel.runner.device import resolve_dtype

    GenerationDefaults.load(folder)
    fields = read_config(folder)
    resolve_dtype("auto", checkpoint_dtype(fields), torch.device("cpu"))
    traits = native_traits(fields)
    if traits is None:
        transformers_config(fields)
    else:
        config = parse_config(fields, traits)
        cos_sin_table(config.rope, config.head_dim, min(config.context_length, 1024), torch.device("cpu"))
        Decoder(config, max_model_len=1, dtype=torch.float32, device=torch.device("meta"))


def gguf(data: bytes) -> None:
    """Read all tensors of a file; then make its folder, and read this up to the model's tensors and tokens."""
    from tidewheel.models.gguf_folder import derived_folder

    with _folder({"model.gguf": data}) as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder)):
        file = folder / "model.gguf"
        try:
            _read_tensors(file)
        except ConfigError as error:
            check_message(str(error))
        made = derived_folder(file)
        _make_model(made)
        _ends_well(lambda: _encode(Tokenizer.load(made, vocab_size=VOCAB_SIZE)))


def _read_tensors(file: Path) -> None:
    import torch

    from tidewheel.models.gguf_file import GGUFFile
    from tidewheel.models.weight_source import uncounted

    source = GGUFFile(file)
    for name, stored in source.tensors.items():
        source.copy({name: torch.empty(stored.shape)}, uncounted)
        if len(stored.shape) == 2:
            source.matrix(name, torch.device("cpu"))


def gguf_values(data: bytes) -> None:
    """Read a file with the metadata and tensors of an object."""
    metadata, tensors = (_object(data).get(key) for key in ("metadata", "tensors"))
    gguf(gguf_bytes(*(part if isinstance(part, dict) else {} for part in (metadata, tensors))))


def tokenizer(data: bytes) -> None:
    """Load in a process first, as an entry does; then load and decode in this one."""
    with _folder(_object(data)) as folder:
        if _ends_well(lambda: _encode(Tokenizer.load(folder, vocab_size=VOCAB_SIZE))):
            made = Tokenizer.load(folder, vocab_size=VOCAB_SIZE)
            for token_ids in (*_encode(made), range(5), (VOCAB_SIZE, 2**31 - 1), *zip(range(VOCAB_SIZE))):
                with contextlib.suppress(InternalError):
                    made.decode(token_ids)


def _encode(made: Tokenizer) -> list[list[int]]:
    return [made.encode(text).tolist() for text in ("Hello  world!", "日本語\n\x00🎉", "a" * 300)]


def chat_template(data: bytes) -> None:
    """Compile and render a template in a process, as an entry does."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    _ends_well(lambda: ChatTemplate(data.decode("utf-8", "replace"), tokens).render(Conversation(_CONVERSATION)))


def _ends_well(job: Callable[[], object]) -> bool:
    """Run in a child with limits and return whether it ended without an error. Raise an undocumented one."""
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or status in (0, REFUSED << 8), "an undocumented error"
        return status == 0
    code = REFUSED + 1
    try:
        memory = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        job()
        code = 0
    except (ConfigError, InvalidRequest, MemoryError):
        code = REFUSED
    finally:
        os._exit(code)


# --- the others ------------------------------------------------------------------------------------------------


def trace(data: bytes) -> None:
    name = "trace.jsonl" if data.lstrip()[:1] in (b"{", b"[") else "trace.csv"
    with _folder({name: data}) as folder:
        read = read_trace(folder / name)
        assert (np.diff(read.arrivals) >= 0).all() and read.arrivals[0] == 0.0
        assert np.isfinite(read.rate)


def engine_messages(data: bytes) -> None:
    """Let an engine handle a list of messages of a front end."""
    try:
        value = msgspec.msgpack.decode(data)
        payloads = [msgspec.msgpack.encode(item) for item in value] if isinstance(value, list) else [data]
    except (ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        payloads = [data]
    serve_messages(payloads)


TARGETS: dict[str, Target] = {
    "sampling_parameters": Target(sampling_parameters),
    "messages": Target(messages),
    "request": Target(request),
    "settings": Target(settings),
    "config_pbtxt": Target(config_pbtxt, "text"),
    "safetensors": Target(safetensors, "text"),
    "model_folder": Target(model_folder),
    "gguf": Target(gguf, "text"),
    "gguf_values": Target(gguf_values),
    "tokenizer": Target(tokenizer),
    "chat_template": Target(chat_template, "text"),
    "trace": Target(trace, "text"),
    "engine_messages": Target(engine_messages, "msgpack"),
}


def _object(data: bytes) -> dict[str, Any]:
    """Return the object that the input holds; empty if it holds none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _folder(files: dict[str, Any]) -> Iterator[Path]:
    """Write files: bytes and texts as they are, other values as JSON. Leave out what is no name of a file."""
    with tempfile.TemporaryDirectory(dir=_memory()) as name:
        for path, content in files.items():
            if not isinstance(content, bytes):
                text = content if isinstance(content, str) else json.dumps(content)
                content = text.encode("utf-8", "surrogatepass")
            with contextlib.suppress(OSError, ValueError):
                target = Path(name, path)
                if target.resolve().is_relative_to(Path(name).resolve()):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
        yield Path(name)


@cache
def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
