"""`tidewheel check`: what it prints, its exit codes, and what --fix changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entries.conftest import WriteEntry
from entries.test_planted_mistakes import CONFIG, TWIN, setting
from support.models import tiny_models
from support.models.gguf_files import write_model
from support.triton.serving import REPOSITORY, WEIGHTS
from tidewheel.cli.main import main
from tidewheel.entries.checking import check
from tidewheel.entries.config_rules import CONFIG_RULES
from tidewheel.runner import device
from tidewheel.server.repository import write_entry

RULES = ("syntax", "folder", "backend", "settings", "model", "together")  # beside `CONFIG_RULES`
MISSPELT = f"""backend: "tidewheel"  # ours
model_transaction_polici {{ decoupled: true }}

# How many run at once
parameters [
  {{ key: 'max_num_seq' value {{ string_value: "4" }} }},
  {{ key: "model" value {{ string_value: "{WEIGHTS}" }} }}  # the demo's
]
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["check", *arguments])
    return code, capsys.readouterr().out


def test_our_repository_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(capsys, str(REPOSITORY), "--strict")
    assert code == 0
    assert printed.splitlines()[-1] == "2 checked, 2 passed over: 0 errors, 0 warnings"
    assert "baseline_static/config.pbtxt:2:1: note: passed over: backend is 'python'" in printed
    token = 2 * 6 * 2 * 32 * 4  # keys and values of the demo model's layers and heads, in float32
    assert f"demo: KV cache 2 x 6 layers x 2 KV heads x 32 x 4 bytes = {token:,} bytes a token; 3 MiB for" in printed


def test_tokenizer_and_template_are_tried_as_at_the_load(write: WriteEntry, weights: Path) -> None:
    (weights / "chat_template.jinja").write_text("{% for %}")
    write("demo_infer", TWIN)
    (found,) = check(write("demo", CONFIG.replace(str(WEIGHTS), str(weights)))).findings
    assert (found.rule, found.severity) == ("model", "error")
    assert "chat template does not compile" in found.message


def test_a_folder_of_a_model_is_checked_as_serve_would_serve_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = run(capsys, str(WEIGHTS), "--set", "device=cpu", "--set", "tensor_parallel_size=2")
    assert code == 0
    whole, part = "weights 5.6 MiB", "on each of 2 ranks 2.8 MiB; this machine has"
    assert f"weights: {whole}, {part}" in printed or "weights: weights 11.2 MiB, on each of 2 ranks" in printed
    assert "room for" in printed and printed.endswith("1 checked, 0 passed over: 0 errors, 0 warnings\n")
    code, printed = run(capsys, str(WEIGHTS), "--set", "tensor_parallel_size=3", "--json")
    assert code == 1
    report = json.loads(printed)
    assert {finding["file"] for finding in report["findings"]} == {str(WEIGHTS)}
    assert "set it to 1 or 2" in report["findings"][-1]["message"]
    assert run(capsys, str(REPOSITORY), "--set", "seed=1")[0] == 2
    assert run(capsys, str(WEIGHTS), "--set", "sed=1")[0] == 2
    assert run(capsys, str(WEIGHTS), "--fix")[0] == 2


def test_a_gguf_file_that_ranks_cannot_split_has_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "num_cores", lambda: 8)
    path = write_model(tmp_path / "tiny.gguf", tiny_models.save(tiny_models.llama, tmp_path / "hf"))
    for model in (path, tmp_path):
        code, printed = run(capsys, str(model), "--set", "device=cpu", "--set", "tensor_parallel_size=3", "--json")
        (finding,) = json.loads(printed)["findings"]
        assert code == 1 and "tensor_parallel_size is 3" in finding["message"]


def test_an_entry_of_serve_is_clean(tmp_path: Path) -> None:
    write_entry(tmp_path, str(WEIGHTS), "one", {"max_num_seqs": "4", "tenants": '{"a": {"weight": 2}}'})
    assert check(tmp_path).findings == []


def test_a_config_of_an_entry_stands_for_it(write: WriteEntry) -> None:
    entry = write("demo", CONFIG)
    write("demo_infer", TWIN)
    report = check(entry / "config.pbtxt")
    assert (report.checked, report.findings) == (["demo"], [])


def test_every_rule_is_in_the_documentation() -> None:
    page = (REPOSITORY.parent / "docs" / "serve.md").read_text()
    assert not [rule for rule in (*RULES, *CONFIG_RULES) if f"`{rule}`" not in page]


def test_exit_codes(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("demo", CONFIG + "optimization { }\n")
    assert run(capsys, str(entry))[0] == 0  # a warning: it is not read
    assert run(capsys, str(entry), "--strict")[0] == 1
    (entry / "config.pbtxt").write_text(CONFIG + setting("sed", "1") + "optimization { }\n")
    code, printed = run(capsys, str(entry))
    assert code == 1
    path = entry / "config.pbtxt"
    assert f"{path}:4:14: error: unknown setting 'sed'; did you mean 'seed'? [settings]" in printed.splitlines()
    assert printed.splitlines()[-1] == "1 checked, 0 passed over: 1 error, 1 warning"


@pytest.mark.parametrize("path", [".", "absent", "absent/config.pbtxt"])
def test_nothing_to_check(tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_the_implementation_is_said(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("demo", CONFIG)
    assert "demo: LlamaForCausalLM, native" in run(capsys, str(entry))[1].splitlines()
    assert json.loads(run(capsys, str(entry), "--json")[1])["models"] == {"demo": "LlamaForCausalLM, native"}


def test_a_folder_that_holds_no_entry_is_named_if_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["check", str(tmp_path)]) == 2
    assert f"{tmp_path} is a LoRA adapter" in capsys.readouterr().err


def test_json(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("demo", CONFIG + setting("sed", "1"))
    write("demo_infer", TWIN)
    write("ensemble", 'platform: "ensemble"\n')
    code, printed = run(capsys, str(entry.parent), "--json")
    report = json.loads(printed)
    assert code == 1
    assert report.keys() == {"version", "checked", "passed_over", "models", "fixed", "kv_cache", "memory", "findings"}
    assert (report["version"], report["checked"], report["passed_over"]) == (1, ["demo", "demo_infer"], ["ensemble"])
    assert report["findings"][0] == {
        "rule": "settings", "severity": "error", "file": str(entry / "config.pbtxt"), "line": 4, "column": 14,
        "field": "parameters.sed", "message": "unknown setting 'sed'; did you mean 'seed'?", "right_name": "seed",
    }  # fmt: skip
    assert {finding["severity"] for finding in report["findings"]} == {"error", "note"}


def test_fix_changes_names_alone(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("demo", MISSPELT, '{\n  "ageing": 3,\n  "seed": 1\n}\n')
    write("demo_infer", TWIN)
    code, printed = run(capsys, str(entry), "--fix")
    assert code == 0, printed
    config, model_json = entry / "config.pbtxt", entry / "1" / "model.json"
    assert config.read_text() == MISSPELT.replace("_polici ", "_policy ").replace("max_num_seq'", "max_num_seqs'")
    assert model_json.read_text() == '{\n  "ageing_s": 3,\n  "seed": 1\n}\n'
    assert [line for line in printed.splitlines() if "fixed" in line] == [
        f"{model_json}:2:3: fixed: ageing is now ageing_s",
        f"{config}:2:1: fixed: model_transaction_polici is now model_transaction_policy",
        f"{config}:6:5: fixed: max_num_seq is now max_num_seqs",
    ]


def test_fix_keeps_the_ends_of_lines(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    entry = write("demo", CONFIG)
    text = CONFIG + "dynamic_batching { preferred_batch_sizes: [ 1, 2 ] }\n"
    (entry / "config.pbtxt").write_text(text, newline="\r\n")
    assert run(capsys, str(entry), "--fix")[1].count("fixed:") == 1
    wanted = text.replace("sizes:", "size:").replace("\n", "\r\n").encode()
    assert (entry / "config.pbtxt").read_bytes() == wanted


def test_fix_leaves_two_names_for_one_setting(write: WriteEntry, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG + setting("sed", "1") + setting("seed", "2")
    entry = write("demo", config)
    assert run(capsys, str(entry), "--fix")[0] == 1
    assert (entry / "config.pbtxt").read_text() == config


def test_without_models_of_ours_torch_is_not_imported(write: WriteEntry) -> None:
    entry = write("other", 'backend: "python"\n')
    code = f"import sys; from tidewheel.cli.main import main; main(['check', {str(entry)!r}])"
    code += "; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
