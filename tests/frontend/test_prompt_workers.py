"""Prompts in processes with limits: what the model's own files or a text can do ends one job."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from support.engine.fake_engine import write_model_folder
from support.frontend.tokenizers_on_the_spot import byte_level_bpe
from tidewheel.errors import ConfigError, Draining, InvalidRequest, PromptTooLarge
from tidewheel.frontend.conversation import Conversation
from tidewheel.frontend.prompt_process import Encode, Folder, Limits
from tidewheel.frontend.prompt_workers import PromptWorkers
from tidewheel.frontend.tokenizer import Tokenizer

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if messages[0].content == 'memory' %}{{ 'x' * 20000000000 }}{% endif %}
{%- if messages[0].content == 'time' %}
    {%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}"""
LIMITS = Limits(trial_s=3.0, job_s=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("model")
    vocab_size = write_model_folder(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Folder(path, vocab_size, 4096)


@pytest.fixture(scope="module")
def workers(folder: Folder) -> Iterator[PromptWorkers]:
    made = PromptWorkers(folder, 2, LIMITS)
    made.wait_tried()
    yield made
    made.close()


def write_tokenizer(path: Path, pattern: str) -> None:
    backend: tokenizers.Tokenizer = byte_level_bpe()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.save(str(path / "tokenizer.json"))


def test_as_in_this_process(workers: PromptWorkers, folder: Folder) -> None:
    local = Tokenizer.load(folder.path, vocab_size=folder.vocab_size)
    for text in ("Hello wörld 🎉", "", "a" * 5000):
        for special in (False, True):
            expected = local.encode(text, add_special_tokens=special)
            ids = workers.encode(text, add_special_tokens=special)
            assert (ids.tolist(), ids.dtype) == (expected.tolist(), expected.dtype)
    assert workers.render(Conversation([{"role": "user", "content": "Grüße\n"}])) == "<user>Grüße\n"


def test_refusals_arrive_as_they_are(workers: PromptWorkers) -> None:
    with pytest.raises(PromptTooLarge, match="max_prompt_bytes"):
        workers.render(Conversation([{"role": "user", "content": "x" * 5000}]))


def test_a_template_that_takes_all_memory_for_one_conversation(workers: PromptWorkers) -> None:
    with pytest.raises(InvalidRequest, match="memory"):
        workers.render(Conversation([{"role": "user", "content": "memory"}]))
    assert workers.render(Conversation([{"role": "user", "content": "x"}])) == "<user>x"


def test_a_process_that_is_killed_is_replaced(workers: PromptWorkers) -> None:
    for _ in range(2):  # each worker serves in turn
        workers.encode("x", add_special_tokens=False)
    for worker in workers._workers:
        assert worker is not None
        os.kill(worker._process.pid, signal.SIGKILL)
    assert workers.encode("Hello", add_special_tokens=False).size


def test_a_conversation_that_takes_the_template_for_ever(workers: PromptWorkers) -> None:
    assert LIMITS.of_job(Encode("x" * (512 << 10), add_special_tokens=False)) == 2.0
    with pytest.raises(InvalidRequest, match=r"within 1 s of CPU time"):
        workers.render(Conversation([{"role": "user", "content": "time"}]))
    assert workers.render(Conversation([{"role": "user", "content": "x"}])) == "<user>x"


def test_a_text_at_which_the_tokenizer_panics(tmp_path: Path) -> None:
    """The trial has no run of x, so the folder loads."""
    vocab_size = write_model_folder(tmp_path)
    write_tokenizer(tmp_path, r"(x+x+)+y")
    workers = PromptWorkers(Folder(tmp_path, vocab_size, 4096), 1, LIMITS)
    try:
        workers.wait_tried()
        with pytest.raises(InvalidRequest, match=r"tokenizer fails at this text: .*retry-limit"):
            workers.encode("x" * 60, add_special_tokens=False)
        assert workers.encode("Hello", add_special_tokens=False).size
    finally:
        workers.close()
    with pytest.raises(Draining, match="shutting down"):
        workers.encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'x' * 20000000000 }}", "too much memory"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "chat template.*CPU time"),
        ("{% if %}", "does not compile"),
    ],
    ids=["memory", "time", "broken"],
)
def test_a_template_that_stops_the_load(tmp_path: Path, template: str, words: str) -> None:
    vocab_size = write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    workers = PromptWorkers(Folder(tmp_path, vocab_size, 4096), 1, LIMITS)
    try:
        with pytest.raises(ConfigError, match=words):
            workers.wait_tried()
    finally:
        workers.close()


def test_a_tokenizer_that_stops_the_load(tmp_path: Path) -> None:
    vocab_size = write_model_folder(tmp_path)
    write_tokenizer(tmp_path, r"(a+a+)+$")
    workers = PromptWorkers(Folder(tmp_path, vocab_size, 4096), 1, LIMITS)
    try:
        with pytest.raises(ConfigError, match=r"tokenizer fails at this text.*60 times"):
            workers.wait_tried()
    finally:
        workers.close()


def test_an_empty_vocabulary_stops_the_load(tmp_path: Path) -> None:
    state = json.loads(byte_level_bpe().to_str())
    state["model"] |= {"vocab": {}, "merges": []}
    state["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="empty vocabulary"):
        Tokenizer.load(tmp_path, vocab_size=100)
