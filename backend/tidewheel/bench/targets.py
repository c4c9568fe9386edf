import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args
from urllib.parse import parse_qs, urlsplit

from tidewheel.bench import BenchError, peer_engines
from tidewheel.bench.driver import BenchTransport
from tidewheel.bench.environment import without_folders
from tidewheel.bench.transports.http import GenerateStreamTransport, InferTransport, OpenAiTransport
from tidewheel.bench.transports.triton_grpc import TritonGrpcTransport
from tidewheel.config import StrategyName

STRATEGIES: tuple[str, ...] = get_args(StrategyName)
BASELINES = ("baseline_dynamic", "baseline_static")
PEERS = ("transformers", "llm", "vllm", "openvino")
_URLS = {
    "grpc": r"grpc://[^/]+/[^/]+",
    "generate_stream": r"https?://[^/]+/v2/models/[^/]+/generate_stream",
    "infer": r"https?://[^/]+/v2/models/[^/]+/infer",
    "openai": r"https?://[^/]+/(.+/)?completions",
}
ELSEWHERE = ("vllm", "openvino")  # in their own environments
TRITON_ONE_SHOT = "triton_one_shot"  # setting of a strategy: its one-shot models are plain instances


class OneShotEntry(NamedTuple):
    """Model that answers in one step, served beside the language model of each target."""

    model: str
    inputs: str  # .npz file of its tensors; empty: random numbers
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """Server or engine to measure. `kind`: ours, baseline, a peer, grpc, generate_stream, infer or openai."""

    name: str
    kind: str
    settings: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    python: str = ""

    def summary(self) -> dict[str, Any]:
        settings = {key: without_folders(value) for key, value in self.settings.items()}
        return {"name": self.name, "kind": self.kind, "settings": settings, "url": self.url}

    @property
    def is_served_here(self) -> bool:
        return self.kind in ("ours", "baseline")

    @property
    def is_peer(self) -> bool:
        return self.kind in PEERS

    @property
    def is_ours(self) -> bool:
        return self.kind in ("ours", "llm")

    @property
    def model(self) -> str:
        if self.kind == "grpc":
            return urlsplit(self.url).path.strip("/")
        match = re.search(r"/v2/models/([^/]+)/", self.url)
        return match[1] if match else ""

    def transport(self, *, with_ids: bool) -> BenchTransport:
        parts = urlsplit(self.url)
        if self.kind == "grpc":
            return TritonGrpcTransport(parts.netloc, self.model, with_ids=with_ids)
        if self.kind == "generate_stream":
            return GenerateStreamTransport(self.url)
        if self.kind == "infer":
            return InferTransport(self.url)
        assert self.kind == "openai"
        model = parse_qs(parts.query).get("model", [""])[0]
        return OpenAiTransport(f"{parts.scheme}://{parts.netloc}{parts.path}", model)


def parse_targets(texts: list[str]) -> list[BenchTarget]:
    targets: dict[str, BenchTarget] = {}
    for target in map(parse_target, texts):
        if targets.setdefault(target.name, target) is not target:
            name = target.name
            raise BenchError(f"--target: {name!r} stands twice: name one of them otherwise, as in other={name}")
    return list(targets.values())


def parse_one_shot(texts: list[str]) -> dict[str, OneShotEntry]:
    """Return models by name, from NAME=FILE[,inputs=FILE.npz][,SETTING=VALUE…] each. Raise `BenchError`."""
    entries = {}
    for text in texts:
        spec, *pairs = re.split(r",(?=\w+=)", text)
        name, _, model = spec.partition("=")
        settings = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        inputs = settings.pop("inputs", "")
        for file in (model, inputs or model):
            if not Path(file).is_file():
                raise BenchError(f"--one-shot {text!r}: no file {file!r}: write NAME=MODEL[,inputs=FILE.npz]")
        entries[name] = OneShotEntry(str(Path(model).resolve()), inputs, settings)
    return entries


def parse_target(text: str) -> BenchTarget:
    target = _parse_target(text)
    known = {"metrics"} if target.url else peer_engines.OPTIONS.get(target.kind, set(target.settings))
    for key in target.settings:
        if key not in known:
            raise BenchError(f"--target {text!r}: {key} is no option of {target.kind}: {', '.join(sorted(known))}")
    return target


def _parse_target(text: str) -> BenchTarget:
    spec, *pairs = re.split(r",(?=[\w-]+=)", text)
    settings: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in settings:
            raise BenchError(f"--target {text!r}: {key} stands twice")
        settings[key] = value
    name, equals, rest = spec.partition("=")
    if not equals or "/" in name:
        name = rest = spec
    kind, _, python = (spec if name in ELSEWHERE else rest).partition("=")
    if kind in ELSEWHERE and equals:
        if not Path(python).is_file():
            raise BenchError(f"--target {name}: no python at {python!r}: make an environment with the peer in it")
        return BenchTarget(name, kind, settings, python=python)
    return _target(name, rest, settings, text)


def _target(name: str, spec: str, settings: dict[str, str], text: str) -> BenchTarget:
    if spec in STRATEGIES:
        return BenchTarget(name, "ours", {"scheduling_strategy": spec, **settings})
    if spec in BASELINES:
        return BenchTarget(name, "baseline", {"entry": spec, **settings})
    if spec in ELSEWHERE:
        raise BenchError(f"--target {text!r}: give the python of its environment: {spec}=/path/to/bin/python")
    if spec in PEERS:
        return BenchTarget(name, spec, settings)
    if "://" in spec:
        parts = urlsplit(spec)
        short = f"{parts.netloc}{parts.path}"
        return BenchTarget(short if name == spec else name, _url_kind(spec, text), settings, url=spec)
    known = ", ".join((*STRATEGIES, *BASELINES, *PEERS))
    raise BenchError(f"--target {text!r}: neither a URL nor one of {known}")


def _url_kind(url: str, text: str) -> str:
    for kind, pattern in _URLS.items():
        if re.fullmatch(pattern, url.partition("?")[0]):
            return kind
    raise BenchError(
        f"--target {text!r}: write grpc://HOST:PORT/MODEL, http://HOST:PORT/v2/models/MODEL/generate_stream, "
        "…/infer, or http://HOST:PORT/v1/completions?model=NAME"
    )
