"""Programs of torch.export against the program itself, and what a file must not do."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.one_shot.loading import load, refusal


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"score": torch.relu(self.linear(x)) * self.scale, "rest": (torch.cat([y, y], 1), x[:, :3].add_(1))}


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[:1].add_(1)
        return x + self.calls


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "model.pt2"
    torch.manual_seed(0)
    free = torch.export.Dim.DYNAMIC
    batch = torch.export.Dim("batch")
    shapes = {"x": {0: batch}, "y": {0: batch, 1: free}}
    torch.export.save(
        torch.export.export(Scorer(), (torch.ones(3, 4), torch.ones(3, 5)), dynamic_shapes=shapes), path
    )
    return path


def test_outputs_are_those_of_the_program(program: Path) -> None:
    adapter, signature = load(program)
    assert [spec.name for spec in signature.inputs] == ["x", "y"] and signature.is_batched
    assert signature.outputs[0].dims == (signature.inputs[0].dims[0], 2)
    assert [spec.dtype for spec in signature.outputs] == ["FP32"] * 3 and "1 thread" in adapter.device
    generator = np.random.default_rng(0)
    for size in (1, 6):
        x, y = generator.random((size, 4), np.float32), generator.random((size, 7), np.float32)
        x.flags.writeable = False
        found = adapter.run({"x": x, "y": y})
        with torch.no_grad():
            wanted = torch.export.load(program).module()(torch.tensor(x), torch.tensor(y))
        expected = [wanted["score"], *wanted["rest"]]
        assert all((one == two.numpy()).all() for one, two in zip(found.values(), expected, strict=True))
        assert found.keys() == {spec.name for spec in signature.outputs}


def rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


class Trap:
    def __reduce__(self) -> Any:
        return (sys.exit, ("unpickled",))


def in_graph(change: Callable[[dict[str, Any]], None]) -> Callable[[str, bytes], bytes]:
    def apply(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        graph = json.loads(content)
        change(graph["graph_module"])
        return json.dumps(graph).encode()

    return apply


def target(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda module: module["graph"]["nodes"][0].update(target=text)


def shape(text: str) -> Callable[[dict[str, Any]], None]:
    def change(module: dict[str, Any]) -> None:
        module["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = text

    return change


def renamed(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda module: module["graph"]["inputs"][-1]["as_tensor"].update(name=text)


@pytest.mark.parametrize(
    "change",
    [
        target("torch.hub.load"),
        target("torch.ops.aten.from_file.default"),
        target("torch.ops.aten.add.__setattr__"),
        target("_operator.methodcaller"),
        shape("__import__('os').system('x')"),
        shape("eval('1')"),
        shape("(eval)('1')"),
        shape("a" * 4000 + "("),
        shape("Integer(2).__class__"),
        renamed("y=print(1)"),
        renamed("__class__"),
    ],
)
def test_text_that_torch_would_evaluate_is_refused(change: Any, program: Path, tmp_path: Path) -> None:
    path = rewrite(program, tmp_path / "model.pt2", in_graph(change))
    assert "models/model.json has" in refusal(path)


def test_nothing_is_unpickled(program: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap.pt"
    torch.save((Trap(),), trap)

    def samples(name: str, old: bytes) -> bytes:
        return trap.read_bytes() if name.endswith("sample_inputs/model.pt") else old

    legacy = rewrite(program, tmp_path / "a.pt2", samples)
    with zipfile.ZipFile(legacy, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        for kind in ("weights", "constants"):
            archive.writestr(f"{root}/data/{kind}/model.pt", trap.read_bytes())
    x, y = np.ones((2, 4), np.float32), np.ones((2, 5), np.float32)
    one, other = (load(path)[0].run({"x": x, "y": y}) for path in (program, legacy))
    assert all((one[name] == other[name]).all() for name in one), "pickled records are not read"

    def payload(name: str, old: bytes) -> bytes:
        if name.endswith("data/weights/weight_0"):
            return pickle.dumps(Trap())
        return old.replace(b'"use_pickle": false', b'"use_pickle": true') if "weights_config" in name else old

    message = refusal(rewrite(program, tmp_path / "b.pt2", payload))
    assert "linear.weight is pickled" in message and "plain tensor" in message


def test_torch_does_not_unpickle_a_file(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((torch, "load"), (pickle, "loads"), (torch._C, "_pickle_load_obj")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("unpickled"))
    load(program)


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_a_broken_file_is_one_line(content: bytes | None, program: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(program.read_bytes()[:-200] if content is None else content)
    assert "model.pt2" in refusal(path)


def test_a_program_that_changes_its_buffers_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Counter(), (torch.ones(2),)), path)
    adapter, _ = load(path)
    with pytest.raises(ValueError, match="changes its buffers"):
        adapter.run({"x": np.ones(2, np.float32)})


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    torch.export.save(torch.export.export(half, (torch.ones(1, 2, dtype=torch.bfloat16),)), path)
    assert "bfloat16" in refusal(path)


def test_an_archive_of_something_else_is_one_line(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "model.pt2")
    assert "model.pt2" in refusal(tmp_path / "model.pt2")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a compiler")
def test_a_package_of_native_code_needs_a_permission(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    exported = torch.export.export(model, (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    path = Path(torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2")))
    assert "allow_native_code" in refusal(path)
    assert "does not say its shapes" in refusal(path, {"allow_native_code": True})
    tensors = {"inputs": [["x", "FP32", ["batch", 4]]], "outputs": [["y", "FP32", ["batch", 2]]]}
    adapter, _ = load(path, {"allow_native_code": True, **tensors})
    x = np.random.default_rng(0).random((5, 4), np.float32)
    wanted = torch._inductor.aoti_load_package(str(path))(torch.tensor(x))
    assert (adapter.run({"x": x})["y"] == wanted.detach().numpy()).all()
