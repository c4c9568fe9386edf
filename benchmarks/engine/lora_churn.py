"""Random loads, unloads, replacements, cancels and kills of an engine with 64 LoRA adapters and 16 slots, on a CPU.

Requests of the base and of all adapters run all the time. Each answer must be the one that the merged model of its
adapter's version gives alone (transformers, float32; ties within rounding are counted), each request must end once,
loaded adapters must outlive a kill, memory must stay flat after the last kill, and nothing may stay. Needs what the
tests need.

    PYTHONPATH=tests python benchmarks lora_churn --minutes 10 --save
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
from transformers import AutoModelForCausalLM

from common.study import Study, show
from gpu.parity import WRONG_SPACINGS, first_divergence
from support.engine.engine_clients import Client, add_request
from support.engine.faulty_engine import prompt_bytes
from support.models import tiny_models
from support.models.peft_folders import read_peft, write_folder, write_merged, write_peft
from tidewheel.config import EngineConfig
from tidewheel.engine.messages import AddRequest
from tidewheel.errors import EngineDead, InvalidRequest, NotFound
from tidewheel.sampling import SamplingParams
from tidewheel_process.child import ProcessHandle, RestartPolicy, wait_until

NAMES, VERSIONS, SLOTS, HOST = 64, 2, 16, 32
PROMPTS = tiny_models.prompts(3, 8, 40, seed=5)
MAX_TOKENS = 24
IN_FLIGHT, ORDERS = 24, 4
ORDERS_PER_S, CANCELLED, BAD, BASE = 4.0, 0.05, 0.1, 0.2  # the last three: shares
KILLING = 0.4  # of the time, at its begin
KILL_S = (3.0, 12.0)  # from one kill to the next
LIMIT_S = 120.0
SPARE_MIB = 16.0
SHARED_MEMORY = Path("/dev/shm")
DEAD, UNKNOWN, REFUSED = EngineDead.tag, NotFound.tag, InvalidRequest.tag
RESTART = RestartPolicy(first_delay_s=0.01, max_delay_s=0.01, max_deaths=1 << 30)

Version = int | None  # None: the name is unknown
Answers = Mapping[tuple[str, Version, int], "Answer"]  # by name (empty: the base), version and prompt


class Answer(NamedTuple):
    tokens: list[int]
    logits: torch.Tensor  # [len(tokens), vocabulary] float32

    def judge(self, tokens: list[int]) -> str:
        """Return "same", "tie" if the first other token is as good within rounding, or "other"."""
        if tokens == self.tokens[: len(tokens)]:
            return "same"
        place = next(i for i, pair in enumerate(zip(tokens, self.tokens, strict=False)) if pair[0] != pair[1])
        found = first_divergence(self.logits[place : place + 1], tokens[place : place + 1], torch.float32)
        return "tie" if found is None or found.spacings < WRONG_SPACINGS else "other"


class Sent(NamedTuple):
    name: str
    prompt: int
    versions: set[Version]  # that may answer
    count: int  # of tokens


class Order(NamedTuple):
    name: str
    version: Version
    is_bad: bool


class Folders(NamedTuple):
    """Model, adapters by name and version, and defective ones."""

    model: Path
    loras: Path
    bad: list[Path]

    def of(self, name: str, version: int) -> Path:
        return self.loras / f"{name}_{version}"


def names() -> list[str]:
    return [f"a{number}" for number in range(NAMES)]


def make_folders(root: Path) -> Folders:
    model, loras = root / "model", root / "loras"
    tiny_models.save(tiny_models.llama, model)
    found = Folders(model, loras, [])
    for number, name in enumerate(names()):
        for version in range(VERSIONS):
            write_peft(
                found.of(name, version), model, seed=1 + VERSIONS * number + version, rank=(4, 8, 16)[number % 3]
            )
    fields, tensors = read_peft(found.of("a0", 0))
    first = next(iter(tensors))
    for label, changed in (("nan", tensors[first] * float("nan")), ("shape", tensors[first][:, 1:].contiguous())):
        found.bad.append(write_folder(loras / f"bad_{label}", fields, {**tensors, first: changed}))
    return found


@torch.inference_mode()
def expected_answers(folders: Folders, scratch: Path) -> dict[tuple[str, Version, int], Answer]:
    """Compute greedy answers of the base and of every merged model."""
    of_models: dict[tuple[str, Version], Path] = {("", None): folders.model}
    for name in names():
        for version in range(VERSIONS):
            merged = write_merged(scratch / f"{name}_{version}", folders.model, folders.of(name, version))
            of_models[name, version] = merged
    found = {}
    for (name, version), folder in of_models.items():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for number, prompt in enumerate(PROMPTS):
            ids = torch.tensor(prompt.tolist())[None]
            out = model.eval().generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS,
                do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
            )  # fmt: skip
            tokens = out.sequences[0, ids.shape[1] :].tolist()
            found[name, version, number] = Answer(tokens, torch.cat(out.logits).float())
    return found


class Churn:
    """Traffic on one client, and what each answer may be."""

    def __init__(self, client: Client, folders: Folders, answers: Answers, seed: int) -> None:
        self.client, self.counts, self.wrong = client, Counter[str](), list[str]()
        self._folders, self._answers, self._draw = folders, answers, random.Random(seed)
        self._next_key = 0
        self._sent: dict[int, Sent] = {}
        self._orders: dict[int, Order] = {}
        self._known: dict[str, set[Version]] = {name: {None} for name in names()}

    def load_all(self) -> None:
        for name in names():
            self._order(Order(name, 0, False))
        self.finish()
        self.counts.clear()

    def step(self, order_chance: float) -> None:
        """Judge what has ended, keep requests in flight, and give an order by chance."""
        self._collect()
        while len(self._sent) < IN_FLIGHT:
            self._request()
        if len(self._orders) < ORDERS and self._draw.random() < order_chance:
            self._random_order()

    def kill(self) -> None:
        os.kill(self.client.info.pid, signal.SIGKILL)
        self.counts["kills"] += 1

    def finish(self) -> None:
        """Wait until all have ended."""
        self.client.recorder.wait_ended(*self._sent, *self._orders, limit_s=LIMIT_S)
        self._collect()

    def ask_each(self) -> None:
        """Ask every name once, and judge the answers."""
        for name in names():
            self._request(name)
        self.finish()

    def _request(self, name: str | None = None) -> None:
        draw, key = self._draw, self._key()
        if name is None:
            name = "" if draw.random() < BASE else f"a{min(int(draw.expovariate(0.06)), NAMES - 1)}"
        pending = {order.version for order in self._orders.values() if order.name == name and not order.is_bad}
        sent = Sent(
            name, draw.randrange(len(PROMPTS)), (self._known[name] | pending) if name else {None},
            draw.randint(1, MAX_TOKENS),
        )  # fmt: skip
        self._add(key, PROMPTS[sent.prompt].tolist(), sent.count, **({"lora_name": name} if name else {}))
        if draw.random() < CANCELLED:
            self.client.cancel(key)  # of which no end is told
            self.counts["cancelled"] += 1
        else:
            self._sent[key] = sent

    def _random_order(self) -> None:
        busy = {order.name for order in self._orders.values()}
        name = self._draw.choice([name for name in names() if name not in busy])
        if self._draw.random() < BAD:
            self._order(Order(name, self._draw.randrange(len(self._folders.bad)), True))
        elif self._draw.random() < 0.3:
            self._order(Order(name, None, False))
        else:
            self._order(Order(name, self._draw.randrange(VERSIONS), False))

    def _order(self, order: Order) -> None:
        key = self._key()
        self._orders[key] = order
        options: dict[str, object] = {"lora_order": "unload" if order.version is None else "load"}
        if order.version is not None:
            bad = self._folders.bad
            path = bad[order.version] if order.is_bad else self._folders.of(order.name, order.version)
            options["lora_path"] = str(path)
        self._add(key, [], 1, lora_name=order.name, **options)

    def _add(self, key: int, prompt: list[int], count: int, **options: object) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        message: AddRequest = add_request(key, prompt_bytes(*prompt), sampling, **options)
        self.client.add(message)

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key

    def _collect(self) -> None:
        recorder = self.client.recorder
        with recorder.changed:
            ended = [key for key in (*self._sent, *self._orders) if key in recorder.endings]
            ends = [(key, recorder.endings[key], recorder.errors[key], recorder.tokens.pop(key, [])) for key in ended]
        for key, ending, message, tokens in ends:
            if key in self._sent:
                self._judge(self._sent.pop(key), ending, message, tokens)
            else:
                self._note(self._orders.pop(key), ending, message)

    def _judge(self, sent: Sent, ending: str, message: str, tokens: list[int]) -> None:
        if ending == DEAD or (ending == UNKNOWN and None in sent.versions and sent.name):
            if tokens and not self._is_right(sent, tokens):
                self.wrong.append(f"{sent}: {tokens} before {ending}")
            self.counts[ending] += 1
        elif ending == "length" and len(tokens) == sent.count and self._is_right(sent, tokens):
            self.counts["answers of adapters" if sent.name else "answers of the base"] += 1
        else:
            self.wrong.append(f"{sent}: {ending} {message} {tokens}")

    def _is_right(self, sent: Sent, tokens: list[int]) -> bool:
        versions = [version for version in sent.versions if version is not None or not sent.name]
        judged = {self._answers[sent.name, version, sent.prompt].judge(tokens) for version in versions}
        self.counts["ties"] += "same" not in judged and "tie" in judged
        return bool(judged & {"same", "tie"})

    def _note(self, order: Order, ending: str, message: str) -> None:
        kind = "bad loads" if order.is_bad else "unloads" if order.version is None else "loads"
        known = self._known[order.name]
        if ending == DEAD:
            self.counts[f"{kind} cut off"] += 1
            if not order.is_bad:
                known |= {order.version}
        elif ending == "stop" and not order.is_bad:
            self.counts[kind] += 1
            self._known[order.name] = {order.version}
        elif ending == REFUSED and order.is_bad:
            self.counts[kind] += 1
        elif ending == UNKNOWN and order.version is None and None in known:
            self.counts["unloads of unknown names"] += 1
            self._known[order.name] = {None}
        else:
            self.wrong.append(f"{order}: {ending} {message}")


def rss_mib(client: Client) -> float:
    return psutil.Process(client.info.pid).memory_info().rss / (1 << 20)


def run(churn: Churn, minutes: float, seed: int) -> list[float]:
    """Run the traffic. Return the engine's memory after the last kill, in MiB, by second."""
    draw, began = random.Random(seed), time.monotonic()
    end, last_kill = began + 60 * minutes, began + 60 * minutes * KILLING
    next_kill, last, next_sample, samples = began + draw.uniform(*KILL_S), began, last_kill + 1, []
    while (now := time.monotonic()) < end:
        churn.step(ORDERS_PER_S * (now - last))
        last = now
        if now > next_kill and now < last_kill:
            churn.kill()
            next_kill = now + draw.uniform(*KILL_S)
        if now > next_sample and churn.client.readiness.state == "ready":
            samples.append(rss_mib(churn.client))
            next_sample = now + 1
        time.sleep(0.005)
    churn.finish()
    churn.ask_each()
    return samples


@contextmanager
def engine(folders: Folders, engine_dir: Path) -> Iterator[Client]:
    config = EngineConfig.from_settings(
        {
            "model": str(folders.model), "dtype": "float32", "device": "cpu", "num_threads": 1, "max_num_seqs": 24,
            "num_blocks": 64, "block_size": 16, "enable_lora": True, "max_loras": SLOTS, "max_lora_rank": 16,
            "max_cpu_loras": HOST, "lora_dir": str(folders.loras), "ageing_s": 1.0,
        }
    )  # fmt: skip
    client = Client(engine_dir, config=config, command=(), hold_s=LIMIT_S, restart=RESTART)
    try:
        client.start(LIMIT_S)
        yield client
    finally:
        client.close()


def left(temporary: Path, older: frozenset[Path]) -> dict[str, Any]:
    shared = [path.name for path in SHARED_MEMORY.iterdir() if path not in older]
    return {
        "files": sorted(path.name for path in temporary.iterdir()),
        "shared_memory": [name for name in shared if not name.startswith("tidewheel")],  # of other servers too
        "processes": len(psutil.Process().children(recursive=True)),
    }


def main() -> None:
    study = Study("lora_churn", __doc__, "torch", "transformers")
    study.add_argument("--minutes", type=float, default=10.0)
    study.add_argument("--seed", type=int, default=0)
    options = study.begin()
    root, of_model = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(prefix="tw-"))
    engine_dir = of_model / "engine"  # the adapters' names are kept beside it
    engine_dir.mkdir(mode=0o700)
    folders = make_folders(root)
    answers = expected_answers(folders, root / "merged")
    shutil.rmtree(root / "merged")
    temporary, older = root / "temporary", frozenset(SHARED_MEMORY.iterdir())
    temporary.mkdir()
    with mock.patch.dict(os.environ, {"TMPDIR": str(temporary)}), engine(folders, engine_dir) as client:
        churn = Churn(client, folders, answers, options.seed)
        churn.load_all()
        churn.ask_each()
        memory = run(churn, options.minutes, options.seed)
        pid, ends = client.info.pid, client.recorder.num_endings
    with closing(ProcessHandle(pid)) as handle:
        is_over = handle.wait(LIMIT_S)
    wait_until(lambda: not any(left(temporary, older).values()), 30.0)
    quarter = len(memory) // 4
    early, late = statistics.median(memory[quarter : 2 * quarter]), statistics.median(memory[-quarter:])
    checks = {
        "wrong": churn.wrong[:20],
        "ended other than once": sum(count != 1 for count in ends.values()),
        "engine ended": is_over,
        "left": left(temporary, older),
        "memory_mib": {"early": early, "late": late, "limit": early + SPARE_MIB},
    }
    show([dict(sorted(churn.counts.items()))])
    for name, value in checks.items():
        print(f"{name}: {value}")
    for folder in (root, of_model):
        shutil.rmtree(folder)
    study.save({"minutes": options.minutes, "counts": dict(churn.counts), **checks})
    if churn.wrong or checks["ended other than once"] or not is_over or any(checks["left"].values()):
        raise SystemExit("failed")
    if late > early + SPARE_MIB:
        raise SystemExit(f"the engine's memory grew from {early:.0f} to {late:.0f} MiB")


if __name__ == "__main__":
    main()
