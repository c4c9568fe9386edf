"""Prompts in processes with limits: what the model's own files or a text can do ends one job."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer
from tokenizers import pre_tokenizers

from support.engine.fake_engine import write_model_folder
from support.frontend.tokenizers_on_the_spot import BACKENDS, byte_level_bpe
from tidewheel.errors import ConfigError, Draining, InvalidRequest, PromptTooLarge, TidewheelError, Unsupported
from tidewheel.frontend import prompt_workers
from tidewheel.frontend.chat import Conversation
from tidewheel.frontend.prompt_workers import (
    DecodeJob,
    EncodeJob,
    GrammarJob,
    Job,
    JobRunner,
    PromptWorkers,
    RenderJob,
    StartJob,
    TokenizerFolder,
)
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.grammar import Grammar
from tidewheel.runner.grammar_compiler import to_source

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if messages[0].content == 'memory' %}{{ 'x' * 20000000000 }}{% endif %}
{%- if messages[0].content == 'time' %}
    {%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}"""
LIMITS: dict[str, Any] = {"start_s": 3.0, "job_s": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFolder:
    path = tmp_path_factory.mktemp("model")
    vocab_size = write_model_folder(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return TokenizerFolder(path, vocab_size, 4096, **LIMITS)


@pytest.fixture(scope="module")
def workers(folder: TokenizerFolder) -> Iterator[PromptWorkers]:
    made = PromptWorkers(folder, 2)
    made.wait_started()
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


def test_as_in_this_process(workers: PromptWorkers, folder: TokenizerFolder) -> None:
    local = Tokenizer.load(folder.path, vocab_size=folder.vocab_size)
    for text in ("Hello wörld 🎉", "", "a" * 5000):
        for special in (False, True):
            expected = local.encode(text, add_special_tokens=special)
            ids = workers.encode(text, add_special_tokens=special)
            assert (ids.tolist(), ids.dtype) == (expected.tolist(), expected.dtype)
    assert workers.run(RenderJob(Conversation([{"role": "user", "content": "Grüße\n"}]))).text == "<user>Grüße\n"


@pytest.mark.parametrize("escapes", [True, False])
def test_special_tokens_in_messages(workers: PromptWorkers, folder: TokenizerFolder, escapes: bool) -> None:
    (end,) = workers.encode("</s>", add_special_tokens=False).tolist()
    messages = [{"role": "user", "content": "a </s> b"}]
    prompt = workers.run(RenderJob(Conversation(messages, escapes_special_tokens=escapes)))
    assert prompt.text == "<user>a </s> b"
    ids = workers.encode(prompt.text, add_special_tokens=False, plain=prompt.plain).tolist()
    assert (end in ids) == (not escapes)
    assert workers.run(DecodeJob(np.array(ids, "<i4").tobytes())).text == prompt.text


def test_no_request_waits_for_the_start_of_a_process(folder: TokenizerFolder) -> None:
    workers = PromptWorkers(folder, 3)
    workers.wait_started()
    assert len(workers._workers) == 3
    workers.close()


def test_refusals_arrive_as_they_are(workers: PromptWorkers) -> None:
    with pytest.raises(PromptTooLarge, match="max_prompt_bytes"):
        workers.run(RenderJob(Conversation([{"role": "user", "content": "x" * 5000}])))


def test_a_template_that_takes_all_memory_for_one_conversation(workers: PromptWorkers) -> None:
    with pytest.raises(InvalidRequest, match="memory"):
        workers.run(RenderJob(Conversation([{"role": "user", "content": "memory"}])))
    assert workers.run(RenderJob(Conversation([{"role": "user", "content": "x"}]))).text == "<user>x"


def test_a_process_that_is_killed_is_replaced(workers: PromptWorkers) -> None:
    workers.encode("x", add_special_tokens=False)
    worker = workers._workers[0]  # does what comes one by one
    assert worker is not None
    os.kill(worker._child.pid, signal.SIGKILL)
    assert workers.encode("Hello", add_special_tokens=False).size


def test_a_conversation_that_takes_the_template_for_ever(workers: PromptWorkers, folder: TokenizerFolder) -> None:
    assert folder.limit_of(EncodeJob("x" * (512 << 10), add_special_tokens=False)) == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(InvalidRequest, match=r"within 1 s of CPU time"):
        workers.run(RenderJob(Conversation([{"role": "user", "content": "time"}])))
    assert workers.run(RenderJob(Conversation([{"role": "user", "content": "x"}]))).text == "<user>x"


def test_a_text_at_which_the_tokenizer_panics(tmp_path: Path) -> None:
    vocab_size = write_model_folder(tmp_path)
    write_tokenizer(tmp_path, r"(x+x+)+y")
    workers = PromptWorkers(TokenizerFolder(tmp_path, vocab_size, 4096, **LIMITS), 1)
    try:
        workers.wait_started()
        with pytest.raises(InvalidRequest, match=r"tokenizer fails at this text: .*retry-limit"):
            workers.encode("x" * 60, add_special_tokens=False)
        assert workers.encode("Hello", add_special_tokens=False).size
    finally:
        workers.close()
    with pytest.raises(Draining, match="shutting down"):
        workers.encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize(
    ("files", "limits", "words"),
    [
        ({"chat_template.jinja": "{% if %}"}, LIMITS, "does not compile"),
        ({"tokenizer.json": "{"}, LIMITS, "is not a tokenizer"),
        ({}, {"memory_mb": 64}, "could not be read within .* 64 MiB of memory"),
    ],
    ids=["template", "tokenizer", "memory"],
)
def test_a_folder_that_stops_the_load(
    tmp_path: Path, files: dict[str, str], limits: dict[str, Any], words: str
) -> None:
    vocab_size = write_model_folder(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    workers = PromptWorkers(TokenizerFolder(tmp_path, vocab_size, 4096, **limits), 1)
    try:
        with pytest.raises(ConfigError, match=words):
            workers.wait_started()
    finally:
        workers.close()


def test_an_empty_vocabulary_stops_the_load(tmp_path: Path) -> None:
    state = json.loads(byte_level_bpe().to_str())
    state["model"] |= {"vocab": {}, "merges": []}
    state["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="empty vocabulary"):
        Tokenizer.load(tmp_path, vocab_size=100)


def chain(count: int) -> Grammar:
    """Rules that each go to the next: compiling them goes as deep."""
    rules = [f'r{i} ::= "x{i}" r{i + 1}' for i in range(count)]
    return Grammar.ebnf("\n".join(["root ::= r0", *rules, f'r{count} ::= "a"']), "guided_grammar")


def test_the_start_reads_the_vocabulary_of_grammars(tmp_path: Path) -> None:
    runner = JobRunner(TokenizerFolder(tmp_path, write_model_folder(tmp_path), 4096))
    assert runner._compiler._tokens is None
    runner.run(StartJob())
    assert isinstance(runner._compiler._tokens, LLTokenizer)


@pytest.mark.parametrize(
    ("job", "prepared"),
    [
        (EncodeJob("a </s> b", add_special_tokens=False, plain=[(2, 6)]), (False, True)),
        (EncodeJob("a </s> b", add_special_tokens=False), (False, False)),
        (GrammarJob(Grammar.regex("a")), (True, False)),
    ],
    ids=["encode", "nothing to prepare", "grammar"],
)
def test_the_limit_of_a_job_begins_after_what_jobs_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Job, prepared: tuple[bool, bool]
) -> None:
    folder = TokenizerFolder(tmp_path, write_model_folder(tmp_path), 4096, **LIMITS)
    runner, at_limits = JobRunner(folder), []

    def limit_cpu(seconds: float) -> None:
        at_limits.append((seconds, runner._compiler._tokens is not None, "renamed" in vars(runner._controls)))

    def serve() -> None:
        with contextlib.suppress(EOFError):
            prompt_workers._serve(theirs, runner, folder)

    monkeypatch.setattr(prompt_workers, "_limit_cpu", limit_cpu)
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        ours.send_bytes(msgspec.msgpack.encode(job))
        thread = threading.Thread(target=serve)
        thread.start()
        ours.recv_bytes()
        ours.close()
        thread.join()
    assert at_limits[1:] == [(folder.limit_of(job), *prepared), (0.0, *prepared)]


def test_grammars_are_tried(workers: PromptWorkers) -> None:
    schema = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}, "guided_json")
    assert workers.run(GrammarJob(schema)).text == to_source(schema)
    assert workers.run(GrammarJob(chain(20))).text == to_source(chain(20))


@pytest.mark.parametrize(
    ("grammar", "error", "words"),
    [
        (Grammar.json_schema({"not": {}, "if": {}}, "guided_json"), Unsupported, 'guided_json .*"if", "not"'),
        (Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}), Unsupported, "not"),
        (Grammar.json_schema({"type": "string", "format": "made-up"}), Unsupported, "made-up"),
        (Grammar.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]}), Unsupported, "oneOf"),
        (Grammar.json_schema({"properties": {"a": {}, "b": {}}, "minProperties": 2}), Unsupported, "minProp|maxProp"),
        (Grammar.json_schema({"type": "text"}), InvalidRequest, "text"),
        (Grammar.json_schema({"$ref": "https://example.com/x"}), InvalidRequest, "example.com"),
        (Grammar.json_schema({"$ref": "#"}), InvalidRequest, "grammar cannot be followed"),
        (Grammar.json_schema('{"a":' * 200 + "1" + "}" * 200), InvalidRequest, "recursion limit"),
        (
            Grammar.json_schema(
                {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(10)]}
            ),
            InvalidRequest,
            "schema too large",
        ),
        (Grammar.regex("a(?=b)", "guided_regex"), Unsupported, "guided_regex .*look-around"),
        (Grammar.regex("(" * 5000), InvalidRequest, "grammar cannot be followed"),
        (Grammar.ebnf("nothing"), InvalidRequest, "grammar is no valid ebnf"),
        (chain(5000), InvalidRequest, "guided_grammar could not be compiled within .* limits of memory and depth"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, Grammar) else "",
)
def test_grammars_that_cannot_be_followed(
    workers: PromptWorkers, grammar: Grammar, error: type[TidewheelError], words: str
) -> None:
    with pytest.raises(error, match=words):
        workers.run(GrammarJob(grammar))
    assert workers.run(GrammarJob(Grammar.regex("after")))


def test_a_tokenizer_without_bytes_refuses_grammars(tmp_path: Path) -> None:
    BACKENDS["WordPiece"]().save(str(tmp_path / "tokenizer.json"))
    runner = JobRunner(TokenizerFolder(tmp_path, 400, 4096))
    with pytest.raises(Unsupported, match="guided_regex is set, and this model offers no grammars"):
        runner.run(GrammarJob(Grammar.regex("a", "guided_regex")))
