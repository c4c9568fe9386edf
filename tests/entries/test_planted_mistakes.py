"""Each mistake in an entry is found by its rule, at its place, with what to do; the entry without it is clean."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from entries.conftest import WriteEntry
from support.frontend.tokenizers_on_the_spot import word_piece
from support.models import tiny_models
from support.triton.serving import WEIGHTS
from tidewheel.entries import model_rules
from tidewheel.entries.checking import CheckReport, check
from tidewheel.entries.findings import Finding
from tidewheel.frontend.prompt_workers import JobRunner, TokenizerFolder
from tidewheel.settings import GIB

# Mistakes are on line 4 and behind it.
CONFIG = f"""backend: "tidewheel"
model_transaction_policy {{ decoupled: true }}
parameters {{ key: "model" value {{ string_value: "{WEIGHTS}" }} }}
"""
TWIN = """backend: "tidewheel"
model_transaction_policy { decoupled: false }
parameters { key: "engine_of" value { string_value: "demo" } }
"""


def setting(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


class Mistake(NamedTuple):
    rule: str
    where: str  # file of the entry, line and column
    field: str
    words: str  # of the message, in order; `…` between them
    config: str = ""  # behind line 3
    model_json: str | None = None
    severity: str = "error"


QUEUE = "dynamic_batching.{}"
GATED = setting("max_waiting_requests", "64")

MISTAKES = {
    "a text for a number": Mistake(
        "syntax", "config.pbtxt:4:17", "", "parse integer … mend it",
        'max_batch_size: "many"\n',
    ),
    "an open brace": Mistake("syntax", "config.pbtxt:4:", "", "Expected \"}\": mend it", "dynamic_batching {\n"),
    "a template": Mistake("syntax", "config.pbtxt:4:", "", "template … fill in", "max_batch_size: ${size}\n"),
    "an unknown field": Mistake(
        "schema", "config.pbtxt:4:1", "dynamic_batchin", "dynamic_batchin … did you mean 'dynamic_batching'",
        "dynamic_batchin { }\n",
    ),
    "an unknown field in a list": Mistake(
        "schema", "config.pbtxt:5:3", "instance_group.0.kinds", "ModelInstanceGroup … 'kinds' … 'kind'",
        "instance_group [ {\n  kinds: KIND_CPU\n} ]\n",
    ),
    "a parameter twice": Mistake(
        "schema", "config.pbtxt:4:14", "parameters.seed", "2 times … keep one",
        setting("seed", "1") + setting("seed", "2")
    ),
    "another name": Mistake("name", "config.pbtxt:4:1", "name", "'other' … 'demo' … remove name", 'name: "other"\n'),
    "a version that is not there": Mistake(
        "version-folder", "config.pbtxt:4:1", "version_policy", "[7] … [1]",
        "version_policy { specific { versions: [ 7 ] } }\n",
    ),
    "a misspelt setting": Mistake(
        "settings", "config.pbtxt:4:14", "parameters.max_num_seq", "'max_num_seq' … 'max_num_seqs'",
        setting("max_num_seq", "4"),
    ),
    "a misspelt setting of vLLM": Mistake(
        "settings", "model.json:3:5", "gpu_memory_utilisation", "'gpu_memory_utilization'", "",
        '{\n    "seed": 1,\n    "gpu_memory_utilisation": 0.5\n}\n',
    ),
    "a word for a number": Mistake(
        "settings", "config.pbtxt:4:14", "parameters.max_num_seqs", "'two' … integer", setting("max_num_seqs", "two")
    ),
    "a number out of range": Mistake(
        "settings", "config.pbtxt:5:3", "parameters.gpu_memory_utilization", "is 9.0 … 0.05 to 1",
        'parameters {\n  key: "gpu_memory_utilization"\n  value { string_value: "9" }\n}\n',
    ),
    "a contradiction": Mistake(
        "settings", "config.pbtxt:4:14", "parameters.num_blocks", "both set … memory_mb to None",
        setting("num_blocks", "99") + setting("kv_cache_memory_mb", "99"),
    ),
    "what is not offered": Mistake(
        "settings", "model.json:1:2", "pipeline_parallel_size", "is 2 … layers are not spread … set it to 1", "",
        '{"pipeline_parallel_size": 2}',
    ),
    "under an alias": Mistake(
        "settings", "model.json:1:2", "num_gpu_blocks_override", "num_blocks is 0 … at least 1", "",
        '{"num_gpu_blocks_override": 0}',
    ),
    "two values": Mistake(
        "settings", "config.pbtxt:4:14", "parameters.seed", "'1' … 2 in 1/model.json … keep one",
        setting("seed", "1"),
        '{"seed": 2}',
    ),
    "an argument of vllm serve": Mistake(
        "settings", "model.json:1:2", "enable_auto_tool_choice", "unknown setting … of vllm serve … remove it", "",
        '{"enable_auto_tool_choice": true}',
    ),
    "no effect": Mistake(
        "settings", "model.json:1:2", "lora_dtype", "no effect here … LoRA", "", '{"lora_dtype": "auto"}', "note"
    ),
    "no effect in an object": Mistake(
        "settings", "model.json:1:2", "speculative_config", "prompt_lookup_max has no effect … longest match",
        "", '{"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}}', "note",
    ),
    "a method of vLLM that is not here": Mistake(
        "settings", "model.json:1:2", "speculative_config", "speculation is 'medusa' … prompt_lookup", "",
        '{"speculative_config": {"method": "medusa"}}',
    ),
    "too many drafts": Mistake(
        "settings", "model.json:1:2", "speculative_config", "num_speculative_tokens is 64 … 1 to 32", "",
        '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 64}}',
    ),
    "no object": Mistake(
        "settings", "model.json:1:2", "speculative_config", "is 'ngram' … no JSON object … write one", "",
        '{"speculative_config": "ngram"}',
    ),
    "a draft model that is missing": Mistake(
        "model", "config.pbtxt:5:14", "parameters.draft_model", "draft_model cannot be found … /absent",
        setting("speculation", "draft_model") + setting("draft_model", "/absent"),
    ),
    "a dialect that Triton does not see": Mistake(
        "settings", "model.json:1:2", "io_dialect", "io_dialect in config.pbtxt", "", '{"io_dialect": "trtllm"}'
    ),
    "a limit of tenants": Mistake(
        "settings", "config.pbtxt:4:14", "parameters.tenants", "tenants.a … 'wieght' … 'weight'",
        setting("tenants", "{\\\"a\\\": {\\\"wieght\\\": 2}}"),
    ),
    "no JSON": Mistake("model-json", "model.json", "", "not JSON … line 1", "", '{"seed": }'),
    "a key twice": Mistake(
        "model-json", "model.json:1:13", "seed", "2 times … keep one", "", '{"seed": 1, "seed": 2}'
    ),
    "a tensor of another type": Mistake(
        "tensors", "config.pbtxt:4:9", "input.top_k", "TYPE_INT64 … TYPE_INT32",
        'input [ { name: "top_k" data_type: TYPE_INT64 dims: [ 1 ] optional: true } ]\n',
    ),
    "a tensor of another shape": Mistake(
        "tensors", "config.pbtxt:5:3", "input.top_k", "[1, 1] … [1]",
        'input [\n  { name: "top_k" data_type: TYPE_INT32 dims: [ 1, 1 ] optional: true }\n]\n',
    ),
    "an unknown input": Mistake(
        "tensors", "config.pbtxt:4:1", "input.prompt", "'prompt' … leave it out",
        'input { name: "prompt" data_type: TYPE_STRING dims: [ 1 ] }\n',
    ),
    "an unknown output": Mistake(
        "tensors", "config.pbtxt:4:1", "output.texts", "'texts' … leave it out",
        'output { name: "texts" data_type: TYPE_STRING dims: [ -1 ] }\n',
    ),
    "a batch size": Mistake(
        "tensors", "config.pbtxt:4:1", "max_batch_size", "is 8 … leave it out", "max_batch_size: 8\n"
    ),
    "a required prompt": Mistake(
        "tensors", "config.pbtxt:4:1", "input.text_input", "messages or input_ids are refused … optional: true",
        'input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }\n', severity="note",
    ),
    "levels without a default": Mistake(
        "native-queue", "config.pbtxt:4:20", QUEUE.format("priority_levels"), "is 0 … 1 to 3",
        "dynamic_batching { priority_levels: 3 }\n" + GATED,
    ),
    "a policy of no level": Mistake(
        "native-queue", "config.pbtxt:6:27", QUEUE.format("priority_queue_policy.5"), "key 5 … 1 to 2",
        "dynamic_batching {\n  priority_levels: 2 default_priority_level: 1\n"
        "  priority_queue_policy { key: 5 value { max_queue_size: 9 } }\n}\n" + GATED,
    ),
    "levels without the gate": Mistake(
        "native-queue", "config.pbtxt:4:20", QUEUE.format("priority_levels"),
        "max_waiting_requests is not set … 1024",
        "dynamic_batching { priority_levels: 3 default_priority_level: 2 }\n", severity="warning",
    ),
    "a preferred batch": Mistake(
        "native-queue", "config.pbtxt:4:20", QUEUE.format("preferred_batch_size"), "[4, 8] … remove it",
        "dynamic_batching { preferred_batch_size: [ 4, 8 ] }\n",
    ),
    "a delay": Mistake(
        "native-queue", "config.pbtxt:4:20", QUEUE.format("max_queue_delay_microseconds"), "is 500 … remove it",
        "dynamic_batching { max_queue_delay_microseconds: 500 }\n", severity="warning",
    ),
    "answers in order": Mistake(
        "native-queue", "config.pbtxt:4:20", QUEUE.format("preserve_ordering"), "continuous batching … remove it",
        "dynamic_batching { preserve_ordering: true }\n", severity="warning",
    ),
    "milliseconds for microseconds": Mistake(
        "native-queue", "config.pbtxt:4:43", QUEUE.format("default_queue_policy.default_timeout_microseconds"),
        "is 3000 (0.003 s) … raise it",
        "dynamic_batching { default_queue_policy { default_timeout_microseconds: 3000 } }\n", severity="warning",
    ),
    "timeouts that do not count": Mistake(
        "native-queue", "config.pbtxt:4:43", QUEUE.format("default_queue_policy.allow_timeout_override"),
        "default_timeout_microseconds is not set … set it",
        "dynamic_batching { default_queue_policy { allow_timeout_override: true } }\n", severity="warning",
    ),
    "a sequence batcher": Mistake(
        "other-schedulers", "config.pbtxt:4:1", "sequence_batching", "remove it … session", "sequence_batching { }\n"
    ),
    "a response cache": Mistake(
        "other-schedulers", "config.pbtxt:4:1", "response_cache", "Triton refuses it",
        "response_cache { enable: true }\n",
    ),
    "a GPU that is not there": Mistake(
        "instances", "config.pbtxt:4:20", "instance_group.0.kind", "KIND_GPU … has 0 … KIND_CPU",
        "instance_group [ { kind: KIND_GPU } ]\n",
    ),
    "a GPU that is not there, without a kind": Mistake(
        "instances", "config.pbtxt:4:18", "instance_group.0.kind", "KIND_AUTO for GPU 1 … has 0",
        "instance_group [ { gpus: [ 1 ] } ]\n",
    ),
    "GPUs of a CPU": Mistake(
        "instances", "config.pbtxt:4:35", "instance_group.0.gpus", "[0] … remove gpus",
        "instance_group [ { kind: KIND_CPU gpus: [ 0 ] } ]\n",
    ),
    "too many instances": Mistake(
        "instances", "config.pbtxt:4:35", "instance_group.0.count", "is 9 … 2 cores",
        "instance_group [ { kind: KIND_CPU count: 9 } ]\n", severity="warning",
    ),
    "what nothing reads": Mistake(
        "not-read", "config.pbtxt:4:1", "optimization", "remove it", "optimization { }\n", severity="warning"
    ),
    "what a CPU does not promise": Mistake(
        "model", "config.pbtxt:5:14", "parameters.deterministic", "is true … use a GPU … or set it to false",
        setting("device", "cpu") + setting("deterministic", "true"),
    ),
    "a longer context": Mistake(
        "model", "config.pbtxt:4:14", "parameters.max_model_len", "is 4096 … at most 1024",
        setting("max_model_len", "4096")
    ),
    "a cache too small for a request": Mistake(
        "model", "model.json:1:2", "max_model_len", "max_model_len is 1024 … num_blocks 3", "",
        '{"max_model_len": 1024, "num_blocks": 3}',
    ),
    "a cache too small for the model's context": Mistake(
        "model", "config.pbtxt:4:14", "parameters.num_blocks", "is 48 of a context of 1024 … num_blocks 3",
        setting("num_blocks", "3"), severity="note",
    ),
    "a cache too large for the machine": Mistake(
        "model", "config.pbtxt:4:14", "parameters.kv_cache_memory_mb", "host memory … KV cache 931.3 GiB … lower",
        setting("kv_cache_memory_mb", "953674"),
    ),
}  # fmt: skip


def matches(words: str, message: str) -> bool:
    return re.search(".*".join(map(re.escape, words.split(" … "))), message) is not None


def shown(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


def place(finding: Finding) -> str:
    return ":".join(str(part) for part in (Path(finding.file).name, finding.line, finding.column) if part is not None)


class QuickTrial:
    """Stand-in for `PromptWorkers`, without a process of its own."""

    def __init__(self, folder: TokenizerFolder, count: int) -> None:
        self._folder = folder

    def wait_started(self) -> None:
        JobRunner(self._folder)

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def quick_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_rules, "PromptWorkers", QuickTrial)


@pytest.fixture
def repository(write: WriteEntry, tmp_path: Path) -> Path:
    write("demo", CONFIG)
    write("demo_infer", TWIN)
    return tmp_path / "models"


def test_the_entry_without_a_mistake(repository: Path) -> None:
    report = check(repository)
    assert (report.checked, report.findings) == (["demo", "demo_infer"], [])


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake(repository: Path, mistake: Mistake) -> None:
    entry = repository / "demo"
    (entry / "config.pbtxt").write_text(CONFIG + mistake.config)
    if mistake.model_json is not None:
        (entry / "1" / "model.json").write_text(mistake.model_json)
    findings = check(entry).findings
    found = [finding for finding in findings if (finding.rule, finding.field) == (mistake.rule, mistake.field)]
    assert len(found) == 1, shown(findings)
    assert place(found[0]).startswith(mistake.where)
    assert found[0].severity == mistake.severity
    assert matches(mistake.words, found[0].message), found[0].message
    others = [finding for finding in findings if finding.severity == "error" and finding != found[0]]
    assert not others, shown(others)


Damage = Callable[[Path], None]


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def lacking_a_shard(folder: Path) -> None:
    shards = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def retokenized(folder: Path) -> None:
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text())
    vocab = file["model"]["vocab"]
    vocab["never heard of"] = vocab.pop(next(iter(vocab)))
    path.write_text(json.dumps(file))


def configured(**changes: object) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (truncated, "model.safetensors", "not a valid safetensors file … download it again"),
        (lacking_a_shard, "model-00002-of-00002.safetensors", "is missing … download it again"),
        (pickled, "weights", "pickled … convert them"),
        (without("model.safetensors"), "weights", "no weights: model.safetensors"),
        (without("tokenizer.json"), "weights", "no tokenizer.json: set tokenizer"),
        (without("config.json"), "config.json", "does not exist: give the folder"),
        (configured(num_hidden_layers=9), "weights", "checkpoint lacks model.layers … do not match"),
        (configured(vocab_size=100), "tokenizer.json", "tokens and the model 100 … another model"),
        (configured(architectures=["MambaForCausalLM"]), "config.json", "MambaForCausalLM is not offered"),
        (configured(architectures=["HovercraftForCausalLM"]), "config.json", "'HovercraftForCausalLM' is unknown"),
        (configured(auto_map={"AutoModel": "evil.Model"}), "config.json", "auto_map … never done"),
        (configured(quantization_config={"bits": 4}), "config.json", "quantised … take the float model"),
    ],
)
def test_damaged_model(write: WriteEntry, weights: Path, damage: Damage, file: str, words: str) -> None:
    damage(weights)
    entry = write("demo", CONFIG.replace(str(WEIGHTS), str(weights)))
    findings = [finding for finding in check(entry).findings if finding.rule == "model"]
    assert any(Path(finding.file).name == file and matches(words, finding.message) for finding in findings), findings
    assert all(finding.severity == "error" for finding in findings)


@pytest.mark.parametrize("is_this_machine", [True, False])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("config.json"), "config.json does not exist"),
        (configured(vocab_size=1 << 20), "draft_model is … of vocab_size 1048576; the model has … same tokenizer"),
        (retokenized, "draft_model is … in whose tokenizer.json … it is not in the model's … same tokenizer"),
        (configured(max_position_embeddings=16), "draft_model is … at most 16 tokens, and max_model_len is"),
        (configured(architectures=["MambaForCausalLM"]), "MambaForCausalLM is not offered"),
    ],
)
def test_damaged_draft_model(
    write: WriteEntry, weights: Path, damage: Damage, words: str, is_this_machine: bool
) -> None:
    damage(weights)
    entry = write("demo", CONFIG + setting("speculation", "draft_model") + setting("draft_model", str(weights)))
    findings = check(entry, is_this_machine=is_this_machine).findings
    found = [finding for finding in findings if finding.severity != "note"]
    assert len(found) == 1, shown(findings)
    assert matches(words, found[0].message), found[0].message


@pytest.mark.parametrize("is_this_machine", [True, False])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"speculation": "first_layers", "num_draft_layers": "99"}, "num_draft_layers is 99: the model has … layers"),
        ({"speculation": "eagle3", "draft_model": str(WEIGHTS)}, "LlamaForCausalLM is no EAGLE-3 head"),
    ],
)
def test_other_drafts_that_cannot_be(
    write: WriteEntry, settings: dict[str, str], words: str, is_this_machine: bool
) -> None:
    entry = write("demo", CONFIG + "".join(setting(name, value) for name, value in settings.items()))
    findings = check(entry, is_this_machine=is_this_machine).findings
    found = [finding for finding in findings if finding.severity != "note"]
    assert len(found) == 1, shown(findings)
    assert matches(words, found[0].message), found[0].message


def test_a_draft_model_that_is_only_seen_from_here(
    write: WriteEntry, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(weights.parent)
    entry = write("demo", CONFIG + setting("speculation", "draft_model") + setting("draft_model", weights.name))
    (found,) = [finding for finding in check(entry).findings if finding.severity != "note"]
    assert (found.severity, found.rule) == ("warning", "model")
    assert matches(f"draft_model is '{weights.name}', a folder only seen from here", found.message)


def test_a_draft_model_that_fits(write: WriteEntry, weights: Path) -> None:
    config = CONFIG + setting("speculation", "draft_model") + setting("draft_model", str(weights))
    report = check(write("demo", config))
    assert not report.count("error"), shown(report.findings)
    plain = check(write("plain", CONFIG))
    both, alone = report.needs["demo"][1], plain.needs["plain"][1]
    assert (both.weights, both.cache) == (2 * alone.weights, 2 * alone.cache)


def test_a_draft_model_counts_before_the_cache_is_sized(write: WriteEntry, weights: Path) -> None:
    config = CONFIG + setting("kv_cache_memory_mb", "1")
    report = check(
        write("demo", config + setting("speculation", "draft_model") + setting("draft_model", str(weights)))
    )
    plain = check(write("plain", config))
    (both,), (alone,) = (
        [int(n.replace(",", "")) for n in re.findall(r"room for ([\d,]+)", text)]
        for text in (report.memory["demo"], plain.memory["plain"])
    )
    assert both == alone // 2


@pytest.mark.parametrize(
    ("config", "rule", "where", "words"),
    [
        (CONFIG.replace('"tidewheel"', '"tidewhel"'), "backend", "config.pbtxt:1:1", "'tidewhel' … 'tidewheel'"),
        (CONFIG.replace("backend:", "platform:"), "backend", "config.pbtxt:1:1", 'write backend: "tidewheel", not'),
        ('backend: "vllm"\n', "backend", "config.pbtxt:1:1", "passed over … tidewheel migrate"),
        (CONFIG.replace('"model"', '"modell"'), "settings", "config.pbtxt:3:14", "did you mean 'model'"),
        (CONFIG.replace("parameters", "parameter"), "schema", "config.pbtxt:3:1", "did you mean 'parameters'"),
        (CONFIG.partition("\n")[2], "backend", "config.pbtxt", 'add backend: "tidewheel"'),
        (CONFIG.replace(str(WEIGHTS), "nowhere"), "model", "config.pbtxt:3:14", "'nowhere': no such folder"),
        (CONFIG.replace(setting("model", str(WEIGHTS)), ""), "settings", "config.pbtxt", "model is not set … give"),
        (TWIN.replace('"demo"', '"absent"'), "settings", "config.pbtxt:3:14", "'absent' … no model of that name"),
        (TWIN.replace('"demo"', '"python"'), "settings", "config.pbtxt:3:14", "backend 'python' … only"),
        (TWIN.replace('"demo"', '"twin"'), "settings", "config.pbtxt:3:14", "'twin', itself a twin: name 'demo'"),
        (TWIN + setting("seed", "1"), "settings", "config.pbtxt:4:14", "seed: engine settings belong to 'demo'"),
        (TWIN + "response_cache { enable: true }", "other-schedulers", "config.pbtxt:4:1", "repeated … remove it"),
    ],
)  # fmt: skip
def test_mistake_of_a_whole_entry(
    repository: Path, write: WriteEntry, config: str, rule: str, where: str, words: str
) -> None:
    write("python", 'backend: "python"\n')
    write("twin", TWIN)
    findings = check(write("wrong", config)).findings
    findings = [finding for finding in findings if finding.severity != "note" and finding.rule != "transactions"]
    assert len(findings) == 1, shown(findings)
    (found,) = findings
    assert (found.rule, place(found)) == (rule, where)
    assert matches(words, found.message), found.message


def test_no_version_folder(repository: Path) -> None:
    shutil.rmtree(repository / "demo" / "1")
    (found,) = check(repository / "demo").findings
    assert (found.rule, found.severity) == ("version-folder", "error")
    assert matches("no version folder … demo/1", found.message)


def test_a_stream_without_a_twin(repository: Path) -> None:
    shutil.rmtree(repository / "demo_infer")
    (found,) = check(repository).findings
    assert (found.rule, found.severity, found.line, found.field) == (
        "transactions",
        "note",
        2,
        "model_transaction_policy",
    )
    assert matches("/infer … demo_infer … engine_of demo", found.message)


def test_a_mistake_alone_is_told_of(repository: Path) -> None:
    shutil.rmtree(repository / "demo_infer")
    (repository / "demo" / "config.pbtxt").write_text('backend: "tidewheel"\n')
    (repository / "demo" / "1" / "model.json").write_text('{"model": }')
    (found,) = check(repository).findings
    assert found.rule == "model-json"


def test_a_folder_without_an_entry(repository: Path) -> None:
    for name in (".git", "empty", "another/1"):
        (repository / name).mkdir(parents=True)
    (found,) = check(repository).findings
    assert (found.rule, found.severity, found.file) == ("folder", "error", str(repository / "empty"))
    assert matches("remove the folder or write config.pbtxt", found.message)
    assert check(repository / "demo").findings == []


def test_nothing_checked(write: WriteEntry, tmp_path: Path) -> None:
    write("ensemble", 'platform: "ensemble"\n')
    report = check(tmp_path / "models")
    assert (report.checked, [found.severity for found in report.findings]) == ([], ["note", "warning"])
    assert matches("nothing was checked … tidewheel", report.findings[-1].message)


def test_engines_that_do_not_fit_together(
    repository: Path, write: WriteEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_rules, "available_host_bytes", lambda: 800 << 20)
    config = CONFIG + setting("kv_cache_memory_mb", "512")
    write("second", config)
    (repository / "demo" / "config.pbtxt").write_text(config)
    findings = [finding for finding in check(repository).findings if finding.severity == "error"]
    (found,) = findings
    assert (found.rule, found.file, found.line) == ("together", str(repository), None)
    assert matches("demo, second together need 1.0 GiB … 800 MiB … serve fewer", found.message)


def test_a_model_that_runs_through_transformers(write: WriteEntry, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path / "gpt2")
    word_piece().save(str(tmp_path / "gpt2" / "tokenizer.json"))
    write("demo_infer", TWIN)
    entry = write("demo", CONFIG.replace(str(WEIGHTS), str(tmp_path / "gpt2")))
    assert check(entry).findings == []
    (entry / "config.pbtxt").write_text((entry / "config.pbtxt").read_text() + setting("max_model_len", "4096"))
    (found,) = check(entry).findings
    assert matches("max_model_len is 4096 … at most 256", found.message)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 1 of 2 GiB free; nothing is put on it."""
    monkeypatch.setattr(model_rules, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (("max_num_seqs", "8"), ""),
        (("gpu_memory_utilization", "0.4"), "max_model_len is 1024 … gpu_memory_utilization 0.4 … raise"),
        (("max_num_batched_tokens", "4000000"), "max_model_len is 1024 … estimated steps need … use a larger GPU"),
        (("swap_space", "4000"), "host memory does not suffice: swap_space 4000.0 GiB … lower"),
        (("kv_cache_memory_mb", "1"), "max_model_len is 640 … kv_cache_memory_mb 1 gives no larger KV cache"),
    ],
)
def test_memory_of_a_gpu(gpu: None, repository: Path, parameter: tuple[str, str], words: str) -> None:
    (repository / "demo" / "config.pbtxt").write_text(CONFIG + setting(*parameter))
    messages = [finding.message for finding in check(repository).findings]
    assert len(messages) == bool(words), messages
    assert all(matches(words, message) for message in messages), messages


def test_weights_that_do_not_fit_on_a_gpu(gpu: None, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 2 * GIB))
    (found,) = check(repository).findings
    assert matches("the weights need … a GPU has 1 MiB free", found.message)


@pytest.fixture
def large(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CheckReport]:
    """Checks a model of 8 heads, whose layers take 1.5 GiB in bfloat16, with dummy weights."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(model_rules, "check_ranks_fit", lambda config: None)
    for name in ("empty_cache", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    weights = tmp_path / "large"
    shutil.copytree(WEIGHTS, weights)
    config = json.loads((weights / "config.json").read_text())
    config |= {
        "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256,
    }  # fmt: skip
    (weights / "config.json").write_text(json.dumps(config))

    def check_large(**settings: str) -> CheckReport:
        text = "".join(setting(*pair) for pair in {"load_format": "dummy", **settings}.items())
        (repository / "demo" / "config.pbtxt").write_text(CONFIG.replace(str(WEIGHTS), str(weights)) + text)
        return check(repository)

    return check_large


def test_the_least_number_of_gpus_that_holds_a_model(gpu: None, large: Callable[..., CheckReport]) -> None:
    (found,) = large().findings
    assert matches("the weights need 1.5 GiB … a GPU has 1.0 GiB free of 2.0 GiB", found.message)
    assert found.message.endswith("; it fits 4 such GPUs, with tensor_parallel_size 4")
    (found,) = large(tensor_parallel_size="2").findings
    assert matches("max_model_len … ; it fits 4 such GPUs", found.message)
    report = large(tensor_parallel_size="4")
    assert report.findings == []
    words = "weights 1.5 GiB, on each of 4 ranks … MiB; a GPU has 1.0 GiB free of 2.0 GiB: room for"
    assert matches(words, report.memory["demo"])
    (found,) = large(swap_space="4000", tensor_parallel_size="4").findings
    assert "such GPUs" not in found.message


def test_limits_that_exceed_a_device_together(repository: Path, write: WriteEntry) -> None:
    write("second", CONFIG + setting("device_memory_share", "0.6"))
    (repository / "demo" / "config.pbtxt").write_text(CONFIG + setting("device_memory_share", "0.5"))
    found = next(finding for finding in check(repository).findings if finding.rule == "together")
    assert matches(
        "device_memory_share of demo, second is 1.1 together: at most 1 is allowed on one machine", found.message
    )


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {}, "gpu_memory_utilization of second is 0.9; demo may take 0.9 … no room … device_memory_share"),
        ({"gpu_memory_utilization": "0.55"}, {"gpu_memory_utilization": "0.55"}, "demo may take 0.55 of the GPU"),
        ({"gpu_memory_utilization": "0.55"}, {}, ""),  # if loaded in this order
        ({"device_memory_share": "0.55"}, {"gpu_memory_utilization": "0.55"}, "; shares may take 0.55 of the GPU"),
        ({"device_memory_share": "0.55"}, {"device_memory_share": "0.4"}, ""),
    ],
)
def test_engines_that_share_a_gpu(
    gpu: None, repository: Path, write: WriteEntry, first: dict[str, str], second: dict[str, str], words: str
) -> None:
    texts = [CONFIG + "".join(setting(*one) for one in settings.items()) for settings in (first, second)]
    write("second", texts[1])
    (repository / "demo" / "config.pbtxt").write_text(texts[0])
    messages = [finding.message for finding in check(repository).findings if finding.rule == "together"]
    assert len(messages) == bool(words), messages
    assert all(matches(words, message) for message in messages), messages


def test_a_broken_config_json_is_told_once(write: WriteEntry, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for file in WEIGHTS.iterdir():
        (weights / file.name).symlink_to(file)
    (weights / "config.json").unlink()
    (weights / "config.json").write_text("{ broken")
    (found,) = check(write("demo", CONFIG.replace(str(WEIGHTS), str(weights)))).findings
    assert matches("config.json is not JSON", found.message)


def test_the_folder_one_is_in(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository / "demo")
    for path in (".", "config.pbtxt", "1/.."):
        assert check(Path(path)).checked == ["demo"]
    assert check(Path("..")).checked == ["demo", "demo_infer"]


def test_messages_nested_without_end(repository: Path) -> None:
    (repository / "demo" / "config.pbtxt").write_text("dynamic_batching {" * 50_000)
    assert [finding.rule for finding in check(repository / "demo").findings] == ["syntax"]


def test_a_mistake_of_the_engine_is_one_of_its_twin(repository: Path) -> None:
    (repository / "demo" / "config.pbtxt").write_text(CONFIG + setting("sed", "1"))
    (found,) = check(repository / "demo_infer").findings
    assert (found.field, place(found)) == ("parameters.engine_of", "config.pbtxt:3:14")
    assert matches("'demo', whose engine cannot be had … 'sed' … 'seed'", found.message)


def test_every_mistake_of_one_entry_is_found(repository: Path) -> None:
    config = (
        CONFIG + setting("sed", "1") + setting("max_num_seqs", "0") + setting("block_size", "7") + 'name: "other"\n'
    )
    (repository / "demo" / "config.pbtxt").write_text(config)
    lines = {finding.line for finding in check(repository / "demo").findings if finding.severity == "error"}
    assert lines == {4, 5, 6, 7}


def test_another_machine_will_serve_it(repository: Path) -> None:
    config = CONFIG + setting("kv_cache_memory_mb", "953674") + "instance_group [ { kind: KIND_GPU count: 9 } ]\n"
    (repository / "demo" / "config.pbtxt").write_text(config)
    assert check(repository / "demo", is_this_machine=False).findings == []


def test_a_model_that_is_not_fetched_yet(write: WriteEntry) -> None:
    entry = write("demo", CONFIG.replace(str(WEIGHTS), "no-such-owner/no-such-model"))
    found = next(finding for finding in check(entry).findings if finding.rule == "model")
    assert (found.severity, found.line) == ("note", 3)
    assert matches("not cached here", found.message)
