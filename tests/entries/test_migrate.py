"""`tidewheel migrate`: the new entry is clean, and what it could not keep is said with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from entries.conftest import WriteEntry
from support.entries.foreign_entries import SAMPLE, SAMPLE_JSON, SAMPLE_LORA_JSON, pbtxt, write_trtllm
from support.models.peft_folders import write_peft
from support.triton.serving import WEIGHTS
from tidewheel.cli.main import main
from tidewheel.entries.checking import check
from tidewheel.entries.entry import parse_config

LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}


def migrate(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> list[str]:
    ended = main(["migrate", *map(str, arguments)])
    captured = capsys.readouterr()
    assert ended == code, captured.err
    return captured.out.splitlines()


def test_the_sample(write: WriteEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("sample", SAMPLE, SAMPLE_JSON)
    out = tmp_path / "out"
    printed = migrate(capsys, entry, "--out", out, "--model", WEIGHTS)
    assert printed == [
        f"{entry}/1/model.json:3:5: changed: disable_log_requests has no effect here: logs, traces and figures have "
        "settings of their own here",
        f"wrote {out}/sample",
        f"now: tidewheel check {out}",
    ]
    assert (out / "sample" / "config.pbtxt").read_text() == SAMPLE.replace('"vllm"', '"tidewheel"')
    settings = json.loads((out / "sample" / "1" / "model.json").read_text())
    assert settings == {key: value for key, value in SAMPLE_JSON.items() if "requests" not in key} | {
        "model": str(WEIGHTS)
    }
    assert check(out).count("error") == 0
    assert (entry / "config.pbtxt").read_text() == SAMPLE


def test_what_is_not_offered_is_cut_out(
    write: WriteEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = """backend: "vllm"
max_batch_size: 4 # by Triton
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true }, # kept
  {
    name: "embedding_request"
    data_type: TYPE_STRING
    dims: [ -1 ]
  },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
dynamic_batching { preferred_batch_size: [ 2, 4 ] default_queue_policy { max_queue_size: 9 } }
parameters: {
  key: "ENABLE_VLLM_HEALTH_CHECK"
  value: { string_value: "true" }
}
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "no" } }
"""
    settings = {
        "model": str(WEIGHTS),
        "pipeline_parallel_size": 2,
        "max_lora_rank": 8,
        "dtype": "half",
        "speculative": 1,
        "speculative_config": LOOKUP,
    }
    entry = write("one", config, settings)
    printed = "\n".join(migrate(capsys, entry, "--out", tmp_path / "out", code=1))
    new = tmp_path / "out" / "one"
    assert (
        (new / "config.pbtxt").read_text()
        == """backend: "tidewheel"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true }, # kept
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
dynamic_batching { default_queue_policy { max_queue_size: 9 } }
parameters: { key: "REPORT_CUSTOM_METRICS" value: { string_value: "no" } }
"""
    )
    kept = json.loads((new / "1" / "model.json").read_text())
    assert kept == {
        "model": str(WEIGHTS),
        "max_lora_rank": 8,
        "dtype": "half",
        "speculative": 1,
        "speculative_config": LOOKUP,
    }
    for words in (
        "config.pbtxt:2:1: changed: max_batch_size is 4", "config.pbtxt:5:3: changed: input 'embedding_request'",
        "config.pbtxt:12:20: changed: preferred_batch_size", "config.pbtxt:14:3: changed: ENABLE_VLLM_HEALTH_CHECK",
        "model.json:3:5: changed: pipeline_parallel_size is 2",
        "model.json:6:5: error: unknown setting 'speculative'",
    ):  # fmt: skip
        assert words in printed
    (unknown,) = (found for found in check(tmp_path / "out").findings if found.severity == "error")
    assert (unknown.rule, unknown.field) == ("settings", "speculative")
    (new / "1" / "model.json").write_text(json.dumps({**kept, "speculative": None}))
    assert check(tmp_path / "out").count("error") == 0


def test_a_method_that_is_not_here_is_left_out(
    write: WriteEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"model": str(WEIGHTS), "speculative_config": {"method": "medusa", "model": "a/b"}}
    printed = "\n".join(migrate(capsys, write("one", 'backend: "vllm"\n', settings), "--out", tmp_path / "out"))
    assert "changed: speculation is 'medusa': choose one of" in printed
    assert json.loads((tmp_path / "out" / "one" / "1" / "model.json").read_text()) == {"model": str(WEIGHTS)}


def test_several_adapters_of_the_vllm_backend(
    write: WriteEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry of docs/llama_multi_lora_tutorial.md of the vLLM backend."""
    write_peft(tmp_path / "loras" / "alpaca-lora-7b", WEIGHTS, rank=8)
    write_peft(tmp_path / "loras" / "bactrian-x-llama-7b-lora", WEIGHTS, seed=1, rank=16)
    adapters = {
        "alpaca": f"{tmp_path}/loras/alpaca-lora-7b", "bactrian": f"{tmp_path}/loras/bactrian-x-llama-7b-lora",
    }  # fmt: skip
    entry = write("vllm_model", SAMPLE.replace("sample", "vllm_model"), SAMPLE_LORA_JSON | {"model": str(WEIGHTS)})
    (entry / "1" / "multi_lora.json").write_text(json.dumps(adapters))
    out = tmp_path / "out"
    printed = migrate(capsys, entry, "--out", out)
    assert [line for line in printed if "lora" in line] == []
    assert json.loads((out / "vllm_model" / "1" / "multi_lora.json").read_text()) == adapters
    kept = json.loads((out / "vllm_model" / "1" / "model.json").read_text())
    assert (kept["enable_lora"], kept["max_lora_rank"]) == ("true", 16)
    assert check(out).count("error") == check(out).count("warning") == 0, check(out).findings


def test_the_rest_of_a_repository_comes_along(
    write: WriteEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("sample", SAMPLE, {**SAMPLE_JSON, "model": str(WEIGHTS)})
    (write("upper", 'backend: "python"\n') / "1" / "model.py").write_text("pass\n")
    ensemble = write("both", 'platform: "ensemble"\nensemble_scheduling { step { model_name: "sample" } }\n')
    repository = ensemble.parent
    migrate(capsys, repository)
    out = repository.with_name("models_tidewheel")
    assert sorted(path.name for path in out.iterdir()) == ["both", "sample", "upper"]
    assert (out / "both" / "config.pbtxt").read_text() == (ensemble / "config.pbtxt").read_text()
    assert (out / "upper" / "1" / "model.py").read_text() == "pass\n"
    assert main(["migrate", str(repository)]) == 2
    assert "exists, and is not written over" in capsys.readouterr().err


def test_in_place(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("sample", SAMPLE, {**SAMPLE_JSON, "model": str(WEIGHTS)})
    assert migrate(capsys, entry, "--in-place")[-1] == f"now: tidewheel check {entry}"
    assert check(entry).count("error") == 0


@pytest.mark.parametrize(
    ("inputs", "left"),
    [
        ("[ { name: 'a' dims: 1 } ]", "[ ]"),
        ("[ { name: 'stream' data_type: TYPE_BOOL dims: 1 }, { name: 'a' dims: 1 } ]",
         "[ { name: 'stream' data_type: TYPE_BOOL dims: 1 } ]"),
        ("[\n  { name: 'a' dims: 1 },\n  { name: 'b' dims: 1 } # last\n]", "[\n]"),
        ("[ { name: 'stream' data_type: TYPE_BOOL dims: 1 }, # one, two\n  { name: 'b' dims: 1 }\n]",
         "[ { name: 'stream' data_type: TYPE_BOOL dims: 1 } # one, two\n]"),
        ("{ name: 'a' dims: 1 }, max_batch_size: 0", None),
    ],
)  # fmt: skip
def test_elements_of_a_list_are_cut_out(
    write: WriteEntry, inputs: str, left: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = write("one", f'backend: "vllm"\ninput {inputs}\n', {"model": str(WEIGHTS)})
    migrate(capsys, entry, "--in-place")
    rest = "max_batch_size: 0\n" if left is None else f"input {left}\n"
    assert (entry / "config.pbtxt").read_text() == f'backend: "tidewheel"\n{rest}'


@pytest.mark.parametrize(
    ("config", "model_json", "words"),
    [
        ('backend: "tidewheel"\n', {}, "no entry of Triton's vLLM or TensorRT-LLM backend"),
        ('backend: "vllm"\n', None, "model.json is missing"),
        ('backend: "vllm\n', {}, "config.pbtxt:1:10: "),
        ('backend: "tensorrtllm"\n', None, "name the model repository"),
    ],
)
def test_what_cannot_be_migrated(
    write: WriteEntry,
    config: str,
    model_json: dict[str, object] | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["migrate", str(write("one", config, model_json))]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def trtllm(tmp_path: Path) -> Path:
    return write_trtllm(tmp_path / "models")


def test_an_ensemble_of_tensorrt_llm(trtllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    printed = "\n".join(migrate(capsys, trtllm, "--out", out, "--model", WEIGHTS, code=1))
    assert sorted(path.name for path in out.iterdir()) == ["add_sub", "ensemble", "tensorrt_llm_bls"]
    ensemble, bls = (
        parse_config((out / name / "config.pbtxt").read_text()) for name in ("ensemble", "tensorrt_llm_bls")
    )
    assert {key: value.string_value for key, value in ensemble.parameters.items()} == {
        "model": str(WEIGHTS), "io_dialect": "trtllm", "gpu_memory_utilization": "0.7",
        "enable_prefix_caching": "true",
        "swap_space": "0.0625", "admit_by_growth": "false", "max_num_seqs": "16", "max_waiting_requests": "500",
        "novel_option": "3",
    }  # fmt: skip
    assert {key: value.string_value for key, value in bls.parameters.items()} == {
        "engine_of": "ensemble", "io_dialect": "trtllm",
    }  # fmt: skip
    assert ensemble.model_transaction_policy.decoupled
    for words in (
        "tensorrt_llm/config.pbtxt:7:5: changed: requests start at once",
        "max_beam_width is '2': beam search is not offered",
        "gpt_model_path is '/engines/llama': the engine file is not read",
        "kv_cache_free_gpu_mem_fraction is '0.7': here",
        "gpu_device_ids is '1': the engine takes the first GPU", "medusa_choices is '[[0]]': speculative",
        "preprocessing/config.pbtxt:4:3: changed: tokenizer_dir",
        "novel_option is '3': no parameter that is known here",
    ):  # fmt: skip
        assert words in printed
    assert not any(
        name in printed for name in ("decoding_mode", "accumulate_tokens", "max_tokens_in_paged", "FORCE_CPU")
    )


def test_the_ensemble_is_clean_but_for_what_is_unknown(
    trtllm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    migrate(capsys, trtllm, "--out", tmp_path / "out", "--model", WEIGHTS, code=1)
    config = tmp_path / "out" / "ensemble" / "config.pbtxt"
    of_twin = "'ensemble', whose engine cannot be had"
    errors = [found for found in check(tmp_path / "out", is_this_machine=False).findings if found.severity == "error"]
    assert all("unknown setting 'novel_option'" in found.message for found in errors)
    assert [found.file for found in errors if of_twin not in found.message] == [str(config)]
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "novel_option" not in line))
    report = check(tmp_path / "out", is_this_machine=False)
    assert (report.count("error"), report.checked) == (0, ["ensemble", "tensorrt_llm_bls"])


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "'/models/llama'"), (["--model", str(WEIGHTS), "--in-place"], "give --out")]
)
def test_tensorrt_llm_needs_to_be_told(
    trtllm: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", str(trtllm), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_an_engine_alone(write: WriteEntry, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = "".join(
        f'input {{ name: "{name}" data_type: TYPE_UINT32 dims: [ 1 ] }}\n' for name in ("max_tokens", "input_lengths")
    )
    write("llama", pbtxt('backend: "tensorrtllm"\n' + inputs, {"max_tokens_in_paged_kv_cache": "1000"}))
    write("other", 'backend: "python"\n')
    printed = migrate(capsys, tmp_path / "models", "--out", tmp_path / "out", "--model", WEIGHTS)
    assert "input 'input_lengths' is not offered" in printed[0]
    config = parse_config((tmp_path / "out" / "llama" / "config.pbtxt").read_text())
    assert (config.parameters["num_blocks"].string_value, config.parameters["block_size"].string_value) == (
        "16",
        "64",
    )
    assert not config.model_transaction_policy.decoupled
    assert [(tensor.name, tensor.data_type) for tensor in config.input] == [("max_tokens", 4)]  # UINT32
    assert check(tmp_path / "out", is_this_machine=False).count("error") == 0
