"""`tidewheel simulate` as a person runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tidewheel.cli.main import main
from tidewheel.simulate.cost_model import CostModel

SMALL = [
    "--requests",
    "40",
    "--set",
    "max_num_seqs=4",
    "--set",
    "max_num_batched_tokens=256",
    "--prompt",
    "uniform:16",
    "--output",
    "uniform:8",
]


SCALED = ["--scaling", "reactive", "--replicas", "1:3"]


def simulate(*arguments: str) -> int:
    return main(["simulate", *SMALL, *arguments])


def test_a_table_for_each_policy_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--policy", "fifo,priority", "--load", "0.5,0.9", "--tenants", "acme:9:4,zed:1:1") == 0
    out = capsys.readouterr().out
    for name in (
        "fifo 50%",
        "fifo 90%",
        "priority 50%",
        "priority 90%",
        "class CRITICAL",
        "class LOW",
        "tenant acme",
    ):
        assert name in out


def test_the_same_seed_prints_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("1", "1", "2"):
        assert (
            simulate(
                "--seed", seed, "--json", "-", "--replicas", "2", "--router", "prefix-aware", "--prefixes", "3:128"
            )
            == 0
        )
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] != {**outputs[2], "seed": 1}
    (result,) = outputs[0]["results"]
    assert result["finished"] == 40 and result["cached_share"] > 0.2


def test_a_scaled_fleet_is_told_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--rate", "200", *SCALED, "--startup-s", "0.1", "--scale", "waiting_per_replica=2") == 0
    out = capsys.readouterr().out
    assert out.startswith("1 to 3 x h200-8b")
    assert "late %" in out and "replica hours" in out and "most replicas" in out


def test_a_history_of_days_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "days.jsonl"
    rows = [{"arrival": 600 * index, "prompt_tokens": 1, "output_tokens": 1} for index in range(300)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    options = ("--scaling", "predictive", "--replicas", "0:2", "--startup-s", "3", "--history", str(path), "--coarse")
    assert simulate("--rate", "2", "--trace", "daily", *options, "--json", "-") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["scaling"] == "predictive"
    (result,) = record["results"]
    assert result["finished"] == 40 and result["replicas"]["most"] >= 1


def test_drafts_are_told_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--set", "speculation=prompt_lookup", "--draft-acceptance", "0.9") == 0
    out = capsys.readouterr().out
    assert "drafts accepted" in out and "accepted a step" in out


@pytest.mark.parametrize("options", [(), ("--draft-acceptance", "0.5", "--coarse")], ids=["unknown", "coarse"])
def test_drafts_that_cannot_be_simulated_are_refused(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate("--set", "speculation=prompt_lookup", *options) == 1
    assert "simulate it without --coarse, and with a draft_acceptance" in capsys.readouterr().err


def test_deadlines_are_refused_where_steps_are_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "deadline_s": 3}\n')
    assert main(["simulate", "--trace", str(path), "--coarse"]) == 2
    assert "has deadline_s: leave out --coarse" in capsys.readouterr().err


def test_plots_are_written(tmp_path: Path) -> None:
    assert simulate("--load", "0.4,0.8", "--tenants", "a:1:critical,b:1:4", "--plots", str(tmp_path / "plots")) == 0
    for name in ("throughput_ttft", "classes", "fairness", "queue"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_in_a_file_runs_at_its_own_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": index / 2, "prompt_tokens": 10, "output_tokens": 3, "session": "s"} for index in range(20)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["simulate", "--trace", str(path), "--json", "-"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["load"] is None and result["offered_per_s"] == pytest.approx(2.0)
    assert main(["simulate", "--trace", str(path), "--rate", "20", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["offered_per_s"] == pytest.approx(20.0)


def test_a_recorded_simulation_replays_and_calibrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--record", str(tmp_path), "--rate", "300") == 0
    (recording,) = tmp_path.glob("*.jsonl")
    assert recording.stat().st_mode & 0o077 == 0
    assert main(["simulate", "--replay", str(recording)]) == 0
    assert "every decision is the same" in capsys.readouterr().out
    cost = tmp_path / "cost.json"
    assert main(["simulate", "--calibrate", str(recording), "--save-cost", str(cost)]) == 0
    assert re.search(r"fitted to \d+ steps", capsys.readouterr().out)
    assert simulate("--cost", str(cost), "--json", "-") == 0


def test_a_decision_that_differs_is_told_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--record", str(tmp_path), "--rate", "300") == 0
    (recording,) = tmp_path.glob("*.jsonl")
    recording.write_text(recording.read_text().replace('"max_num_seqs":4', '"max_num_seqs":3'))
    capsys.readouterr()
    assert main(["simulate", "--replay", str(recording)]) == 1
    out = capsys.readouterr().out
    assert "event " in out and "recorded" in out and "replayed" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "weird"], "--trace is 'weird': choose one of poisson, bursty, switching, daily, or a .jsonl"),
        (["--trace", "absent.jsonl"], "cannot read the trace absent.jsonl"),
        (["--requests", "0"], "--requests is 0: it must be at least 1"),
        (["--rate", "-3"], "--rate is -3: it must be above 0"),
        (["--load", "0.5,x"], "--load has 'x'"),
        (["--load", "99"], "--load has '99'"),
        (["--policy", "lifo"], "scheduling_policy is 'lifo': choose one of"),
        (["--router", "random"], "router is 'random': choose one of"),
        (["--replicas", "0"], "--replicas is 0: it must be a number, at least 1, or MIN:MAX, say 0:4"),
        (["--replicas", "3:1"], "--replicas is 3:1"),
        (["--replicas", "many"], "--replicas is many"),
        (["--replicas", "1:3"], "--replicas is 1:3: MIN:MAX goes with --scaling"),
        (["--scaling", "reactive"], "--scaling needs --replicas MIN:MAX, not 1"),
        (["--scaling", "magic", "--replicas", "1:3"], "scaling is 'magic': choose one of reactive, predictive"),
        (["--scaling", "reactive", "--replicas", "1:99999"], "max_replicas is 99999: it must be 1 to 10000"),
        (["--startup-s", "5"], "--startup-s goes with --scaling"),
        (["--scale", "utilisation=1"], "--scale goes with --scaling"),
        ([*SCALED, "--startup-s", "-5"], "startup_s is -5: it must be 0 or more"),
        ([*SCALED, "--scale", "utilisation"], "--scale 'utilisation': write key=value"),
        ([*SCALED, "--scale", "utilization=0.5"], "unknown setting 'utilization'"),
        ([*SCALED, "--scale", "utilisation=high"], "--scale: Expected `float`, got `str` - at `$.utilisation`"),
        ([*SCALED, "--scale", "utilisation=1.5"], "utilisation is 1.5: it must be above 0 and at most 1"),
        ([*SCALED, "--history", "days.jsonl"], "--history goes with --scaling predictive"),
        (["--scaling", "predictive", "--replicas", "1:2", "--history", "no.jsonl"], "cannot read the trace no.jsonl"),
        (["--coarse", "--policy", "sjf"], "--policy is sjf: --coarse simulates only priority"),
        (["--coarse", "--record", "."], "--record needs every step: leave out --coarse"),
        (["--prompt", "normal:3"], "--prompt is 'normal:3'"),
        (["--output", "constant:0"], "--output: the mean is 0"),
        (["--cost", "absent.json"], "--cost is 'absent.json': no such file, and none of h200-8b"),
        (["--tenants", "a"], "--tenants has 'a': write NAME:SHARE"),
        (["--tenants", "a:1:9"], "--tenants has 'a:1:9'"),
        (["--tenants", "a:1:best"], "--tenants has 'a:1:best'"),
        (["--tenants", "a:0"], "--tenants is 0"),
        (["--tenants", "a:1,a:2"], "--tenants names one of them twice"),
        (["--prefixes", "3"], "--prefixes is '3': write N:TOKENS"),
        (["--set", "max_num_seq=3"], "did you mean 'max_num_seqs'"),
        (["--set", "max_num_seqs=0"], "max_num_seqs is 0"),
        (["--set", "scheduling_policy=fifo"], "use --policy"),
        (["--seed", "-1"], "--seed is -1"),
        (["--record", "absent"], "record is 'absent': there is no folder"),
        (["--replay", "absent.jsonl"], "cannot read the recording absent.jsonl"),
        (["--calibrate", "absent.jsonl"], "cannot read the recording absent.jsonl"),
        (["--replay", "a", "--calibrate", "b"], "--replay and --calibrate exclude each other"),
        (["--save-cost", "x.json"], "--save-cost goes with --calibrate"),
        (["--draft-acceptance", "0.5"], "--draft-acceptance needs --set speculation=METHOD"),
        (["--set", "speculation=prompt_lookup", "--draft-acceptance", "2"], "--draft-acceptance is 2: it must be"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_it(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--requests", "5", *arguments]) in (1, 2)
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_it_says_what_is_offered_and_whether_the_system_keeps_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "600", "--rate", "20"]) == 0
    assert re.search(
        r"^priority: \d+(\.\d)? requests/s are offered, and it keeps up; ", capsys.readouterr().out, re.M
    )
    assert main(["simulate", "--requests", "3000", "--rate", "500"]) == 0
    said = re.search(r"it does not keep up, (\d+) of 3000 refused; (\d+) finish", capsys.readouterr().out)
    assert said is not None
    assert int(said[1]) > 0 and int(said[2]) < 250


def test_policies_that_cannot_differ_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "600", "--rate", "200", "--policy", "fifo,priority"]) == 0
    assert "fifo, priority decide alike: all requests have one class and one tenant" in capsys.readouterr().out
    assert main(["simulate", "--requests", "60", "--rate", "1", "--policy", "fifo,sjf"]) == 0
    assert "fifo, sjf decide alike: nothing waits at this load" in capsys.readouterr().out


def test_the_number_of_replicas_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--requests", "1000", "--rate", "500", "--find-replicas"]) == 0
    found = re.match(r"priority: (\d+) x h200-8b keep up with 500 requests/s", capsys.readouterr().out)
    assert found is not None
    count = int(found[1])
    assert count > 1
    for replicas, keeps_up in ((count, "it keeps up"), (count - 1, "it does not keep up")):
        assert main(["simulate", "--requests", "1000", "--rate", "500", "--replicas", str(replicas)]) == 0
        assert keeps_up in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [([], "needs --rate"), (["--rate", "5", "--replicas", "3"], "--replicas: not with"),
     (["--rate", "5", "--json", "-"], "--json: not with")],
)  # fmt: skip
def test_the_search_refuses_what_it_decides(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    assert main(["simulate", "--find-replicas", *options]) == 2
    assert says in capsys.readouterr().err


def test_requests_of_a_one_shot_model_share_steps_of_their_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "items.jsonl"
    shapes = [{"bucket": name, "prompt_tokens": items} for name, items in (("wide", 3), ("wide", 2), ("tall", 1))] * 4
    path.write_text("\n".join(json.dumps({"arrival": 0, "output_tokens": 9, **shape}) for shape in shapes))
    settings = ("--set", "adapter=onnxruntime", "--set", "max_num_batched_tokens=5")
    (record := tmp_path / "record").mkdir()
    assert main(["simulate", "--trace", str(path), *settings, "--json", "-", "--record", str(record)]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["finished"] == 12
    assert result["replicas"]["steps"] == 6  # 3 wide items, then 2 + 3 three times, 2, and 4 tall ones
    (recording,) = record.iterdir()
    assert main(["simulate", "--replay", str(recording)]) == 0


def test_requests_of_many_steps_share_them_by_shape_and_take_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cost = tmp_path / "steps.jsonl", tmp_path / "cost.json"
    shapes = [("64x64", 70, 0.0), ("64x64", 50, 0.0), ("32x32", 30, 0.0), ("32x32", 10, 0.1)]
    rows = [{"bucket": b, "prompt_tokens": 1, "output_tokens": steps, "arrival": at} for b, steps, at in shapes]
    path.write_text("\n".join(map(json.dumps, rows)))
    CostModel(name="c", overhead_s=1.0, shapes={"64x64": (0.02, 0.01), "32x32": (0.008, 0.002)}).save(cost)
    (record := tmp_path / "record").mkdir()
    options = ["--trace", str(path), "--set", "adapter=diffusers", "--cost", str(cost), "--record", str(record)]
    assert main(["simulate", *options, "--json", "-"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["finished"] == 4 and result["replicas"]["steps"] == 70 + 30
    seconds = 50 * 0.04 + 20 * 0.03 + 10 * 0.012 + 20 * 0.01
    assert result["replicas"]["busy_mean"] * result["replicas"]["hours"] * 3600 == pytest.approx(seconds)
    (recording,) = record.iterdir()
    assert main(["simulate", "--replay", str(recording)]) == 0


def test_audio_is_encoded_within_the_budget_of_a_step_and_costs_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cost = tmp_path / "speech.jsonl", tmp_path / "cost.json"
    line = {"arrival": 0, "prompt_tokens": 4, "output_tokens": 2, "encoder_tokens": 1500}
    path.write_text("\n".join([json.dumps(line)] * 4))
    CostModel(name="c", overhead_s=0.01, seconds_per_encoder_token=1e-4).save(cost)
    (record := tmp_path / "record").mkdir()
    settings = ("--set", "max_num_batched_tokens=3200", "--set", "async_scheduling=false")
    options = ["--trace", str(path), *settings, "--cost", str(cost), "--record", str(record)]
    assert main(["simulate", *options, "--json", "-"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["replicas"]["steps"] == 4  # the first audio, two more, the last, and its last token
    assert result["replicas"]["busy_mean"] * result["replicas"]["hours"] * 3600 == pytest.approx(0.64)
    (recording,) = record.iterdir()
    assert main(["simulate", "--replay", str(recording)]) == 0
