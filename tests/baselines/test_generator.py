"""Batches of transformers `generate`: what a row gets does not depend on who shares its batch."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from support.models import tiny_models
from support.models.gguf_files import write_model
from support.models.quantized_formats import CASES, save_quantized_llama
from support.models.tiny_models import MARGIN, greedy
from tidewheel.bench.batch_generator import Generator, Row, RowEnds, _load_model
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.models.gguf_file import GGUFFile
from tidewheel.models.model_folder import read_config
from tidewheel.models.weight_source import uncounted

CONTEXT, VOCAB = 1024, 4096


def some_rows(count: int, *, ignore_eos: bool = True) -> list[Row]:
    rng = random.Random(7)
    return [
        Row(
            token_ids=[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 40))],
            max_tokens=rng.randint(1, 24),
            ignore_eos=ignore_eos,
        )
        for _ in range(count)
    ]


@pytest.fixture
def rows(generator: Generator) -> list[Row]:
    """Rows whose greedy tokens rounding cannot change."""
    rows = some_rows(12)
    for row in rows:
        assert greedy(generator._model, np.array(row.token_ids, dtype=np.int32), row.max_tokens).margin >= MARGIN
    return rows


def with_eos(generator: Generator, *eos: int) -> Generator:
    return Generator(generator._model, generator._tokenizer, frozenset(eos))


def count_forwards(generator: Generator, rows: list[Row]) -> int:
    calls: list[int] = []
    hook = generator._model.register_forward_hook(lambda *args: calls.append(1))
    try:
        generator.generate(rows)
    finally:
        hook.remove()
    return len(calls)


def test_a_batch_equals_its_rows_one_by_one(generator: Generator, rows: list[Row]) -> None:
    together = generator.generate(rows)
    assert together == [generator.generate([row])[0] for row in rows]
    assert [len(output.token_ids) for output in together] == [row.max_tokens for row in rows]
    assert {output.finish_reason for output in together} == {"length"}
    assert [output.num_input_tokens for output in together] == [len(row.token_ids) for row in rows]


def test_each_row_ends_at_its_own_end_of_sequence(generator: Generator, rows: list[Row]) -> None:
    free = rows[:6]
    texts = [output.token_ids for output in generator.generate(free)]
    row = max(range(len(texts)), key=lambda i: len(set(texts[i])))
    eos = texts[row][len(texts[row]) // 2]
    heeding = [Row(token_ids=r.token_ids, max_tokens=r.max_tokens) for r in free]
    for tokens, output in zip(texts, with_eos(generator, eos).generate(heeding), strict=True):
        end = tokens.index(eos) + 1 if eos in tokens else len(tokens)
        assert output.token_ids == tokens[:end]
        assert output.finish_reason == ("stop" if eos in tokens else "length")
    ignoring = with_eos(generator, eos).generate(free)
    assert [output.token_ids for output in ignoring] == texts


def test_a_batch_is_over_with_its_last_row(generator: Generator, rows: list[Row]) -> None:
    row = max(rows[:6], key=lambda r: r.max_tokens)
    tokens = generator.generate([row])[0].token_ids
    heeding = Row(token_ids=row.token_ids, max_tokens=100)
    short = Row(token_ids=[5, 6, 7], max_tokens=2, ignore_eos=True)
    stop = next(i for i, token in enumerate(tokens) if i >= 2 and token not in tokens[:i])
    assert count_forwards(with_eos(generator, tokens[stop]), [heeding, short]) == stop + 1


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_models.save(tiny_models.llama, tmp_path / "hf")
    path = write_model(tmp_path / "a.gguf", model, gguf.GGMLQuantizationType.Q8_0)
    source, state = GGUFFile(path), model.state_dict()
    source.copy({name: state[name] for name in source.tensors}, uncounted)
    prompts, expected = tiny_models.clear_prompts(model, tiny_models.prompts(20, 4, 40), 4, 8)
    read = Generator.load(EngineConfig(model=str(path), dtype="float32", device="cpu"))
    outputs = read.generate([Row(ids.tolist(), 8, ignore_eos=True) for ids in prompts])
    assert [output.token_ids for output in outputs] == expected
    assert len(read.encode("hehe")) == 2


def test_quantised_layers_become_floats(tmp_path: Path) -> None:
    expected = save_quantized_llama(tmp_path, CASES["int-quantized"]).state_dict()
    found = _load_model(tmp_path, read_config(tmp_path), torch.float32).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_damaged_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="not a valid GGUF file"):
        Generator.load(EngineConfig(model=str(path), device="cpu"))


def test_nothing_to_do(generator: Generator) -> None:
    assert generator.generate([]) == []


def test_row_ends() -> None:
    rows = [
        Row(token_ids=[1], max_tokens=2),
        Row(token_ids=[1], max_tokens=5),
        Row(token_ids=[1], max_tokens=5, ignore_eos=True),
    ]
    ends = RowEnds(rows, 1, torch.tensor([9]))
    assert ends(torch.tensor([[1, 4], [1, 9], [1, 9]]), ()).tolist() == [False, True, False]
    assert ends(torch.tensor([[1, 4, 4], [1, 9, 4], [1, 9, 4]]), ()).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(token_ids=[], max_tokens=1), "the prompt is empty"),
        (Row(token_ids=[4], max_tokens=0), "max_tokens is 0"),
        (Row(token_ids=[4, VOCAB], max_tokens=1), f"{VOCAB}: ids are 0 to {VOCAB - 1}"),
        (Row(token_ids=[-1], max_tokens=1), "-1"),
    ],
)
def test_what_cannot_be_computed_is_refused(generator: Generator, row: Row, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        generator.check(row)


def test_the_context_is_the_limit(generator: Generator) -> None:
    generator.check(Row(token_ids=[4] * (CONTEXT - 8), max_tokens=8))
    with pytest.raises(InvalidRequest, match=f"max_tokens is 8.*1017 tokens.*{CONTEXT}"):
        generator.check(Row(token_ids=[4] * (CONTEXT - 7), max_tokens=8))
