"""The demo model's folder as it is shipped, and the cleaning of the pages that it was trained on. Without torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from demo_corpus import (
    SOURCES,
    MissingCorpusError,
    Source,
    clean_page,
    conversations,
    everyday_case,
    load_documents,
    sentences,
    shortened,
    term_name,
    without_repeats,
)

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "model_repository" / "demo" / "1" / "weights"
TOKENIZER = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
HIDDEN, LAYERS, VOCAB, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 192, 6, 4_096, 448, 6, 2, 32

SPHINX_PAGE = """
<html><head><title>queue</title></head><body>
<div class="related"><p>This navigation must not be read as prose by anybody at all.</p></div>
<div class="body" role="main">
<h1><code><span class="pre">queue</span></code> — A queue class<a class="headerlink" href="#q">¶</a></h1>
<p>The <a href="#q"><code>queue</code></a> module implements queues.<br>It is “useful” in threaded programming.</p>
<div class="highlight"><pre>import queue; print("This code must be dropped from the text.")</pre></div>
<table><tr><td><p>A cell of a table must be dropped from the text too.</p></td></tr></table>
<dl><dt class="sig" id="queue.Queue">class queue.Queue(maxsize=0)<a class="headerlink" href="#r">¶</a></dt>
<dd><p>Constructor for a FIFO queue that holds at most so many items. For example, like this:</p>
<p class="versionadded">New in version 9.9, which is a line that nobody needs here.</p></dd></dl>
</div></body></html>
"""
DOCBOOK_PAGE = """
<div class="navheader"><table><tr><th>Chapter 13. Concurrency Control</th></tr></table><hr /></div>
<div class="sect1"><h2 class="title">13.2. Transaction Isolation</h2><a id="x" class="indexterm"></a><p>
  The <acronym class="acronym">SQL</acronym> standard defines four levels
  of transaction isolation &amp; more.</p>
<h3 class="title">Note</h3><p>Some <span class="quote">“<span class="quote">phenomena</span>”</span> are prohibited
  at the various levels of isolation.</p></div>
<div class="navfooter"><p>This footer must not be read as prose by anybody at all.</p></div>
"""


def read(name: str) -> dict[str, Any]:
    return json.loads((WEIGHTS / name).read_text())


def expected_shapes() -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": [HEADS * HEAD_DIM, HIDDEN],
            prefix + "self_attn.k_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
            prefix + "self_attn.v_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN],
            prefix + "self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD_DIM],
            prefix + "mlp.gate_proj.weight": [INTERMEDIATE, HIDDEN],
            prefix + "mlp.up_proj.weight": [INTERMEDIATE, HIDDEN],
            prefix + "mlp.down_proj.weight": [HIDDEN, INTERMEDIATE],
            prefix + "input_layernorm.weight": [HIDDEN],
            prefix + "post_attention_layernorm.weight": [HIDDEN],
        }
    return shapes


def test_weights_hold_every_tensor_of_the_tied_model_in_bf16() -> None:
    with safe_open(WEIGHTS / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        assert {name: part.get_shape() for name, part in slices.items()} == expected_shapes()
        assert {part.get_dtype() for part in slices.values()} == {"BF16"}


def test_folder_stays_small() -> None:
    assert (WEIGHTS / "model.safetensors").stat().st_size <= 6_000_000
    assert sum(path.stat().st_size for path in WEIGHTS.iterdir()) <= 6_500_000


def test_config_describes_the_model() -> None:
    config = read("config.json")
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 1_024,
        "tie_word_embeddings": True,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert "auto_map" not in config


def test_stop_ids_are_the_special_tokens_that_end_a_text_or_a_turn() -> None:
    ends = [TOKENIZER.token_to_id("<|endoftext|>"), TOKENIZER.token_to_id("<|im_end|>")]
    assert ends == [0, 2]
    assert read("generation_config.json")["eos_token_id"] == read("config.json")["eos_token_id"] == ends


def test_vocabulary_matches_the_embedding() -> None:
    assert TOKENIZER.get_vocab_size(with_added_tokens=True) == VOCAB


@given(st.text())
def test_tokenizer_gives_any_text_back(text: str) -> None:
    encoding = TOKENIZER.encode(text)
    assert TOKENIZER.decode(encoding.ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_and_left_out_of_decoded_text() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\nWhat is a cursor?<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert TOKENIZER.decode(ids) == "user\nWhat is a cursor?"


def test_chat_template_renders_as_in_training() -> None:
    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(
        read("tokenizer_config.json")["chat_template"]
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a cursor?"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is a cursor?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render(messages=messages[1:], add_generation_prompt=False) == (
        "<|im_start|>user\nWhat is a cursor?<|im_end|>\n"
    )


def test_sphinx_page_is_stripped_to_sentences() -> None:
    page = clean_page("queue.html", SPHINX_PAGE)
    assert page.prose == (
        'The queue module implements queues. It is "useful" in threaded programming.\n\n'
        "Constructor for a FIFO queue that holds at most so many items."
    )
    assert [(topic.kind, topic.name) for topic in page.topics()] == [("heading", "queue"), ("term", "queue.Queue")]


def test_docbook_page_is_stripped_to_sentences() -> None:
    page = clean_page("transaction-iso.html", DOCBOOK_PAGE)
    assert page.prose == (
        "The SQL standard defines four levels of transaction isolation & more.\n\n"
        'Some "phenomena" are prohibited at the various levels of isolation.'
    )
    assert [topic.name for topic in page.topics()] == ["Transaction Isolation"]


@pytest.mark.parametrize(
    ("paragraph", "kept"),
    [
        ("See the table below.", ""),
        ("Source code: this is a long line about Lib/queue.py and where to find it.", ""),
        ("0x1F 22 33 44 55 66 77 88 99 (a) 1.", ""),
        (
            "A cursor reads a few rows at a time. Here is one:",
            "A cursor reads a few rows at a time.",
        ),
    ],
)
def test_only_full_sentences_of_prose_are_kept(paragraph: str, kept: str) -> None:
    assert sentences(paragraph) == kept


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("class queue.Queue(maxsize=0)", "queue.Queue"),
        ("PyObject *PyList_New(Py_ssize_t len)", "PyList_New"),
        ("work_mem (integer)", "work_mem"),
        ("foreign data wrapper", "foreign data wrapper"),
    ],
)
def test_term_is_named_as_people_ask_for_it(text: str, name: str) -> None:
    assert term_name(text) == name


def test_headings_are_lower_case_but_names_are_not() -> None:
    assert everyday_case("Using The Python API With PostgreSQL") == "using the Python API with PostgreSQL"


def test_long_answer_is_cut_at_a_sentence() -> None:
    answer = shortened(["Every cursor reads a few rows at a time. " * 40])
    assert answer.endswith("at a time.") and len(answer.split()) <= 110


def test_repeated_paragraphs_are_kept_once() -> None:
    boilerplate = "<p>This notice of exactly eight words comes everywhere.</p>"
    first = f"<p>The first page has {'many words, ' * 20}done.</p>"
    second = f"<p>Another page has {'its prose, ' * 20}end.</p>"
    pages = [clean_page(name, html + boilerplate) for name, html in (("a", first), ("b", second), ("c", first))]
    assert [(page.name, len(page.paragraphs)) for page in without_repeats(pages)] == [("a", 2), ("b", 1)]


def test_conversations_alternate_and_repeat_with_the_seed() -> None:
    page = clean_page("queue.html", SPHINX_PAGE)
    for seed in range(20):
        talks = list(conversations(page, random.Random(seed)))
        assert talks == list(conversations(page, random.Random(seed)))
        for talk in talks:
            roles = [message["role"] for message in talk if message["role"] != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2) and roles


def test_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingCorpusError, match="apt-get install some-doc"):
        load_documents([Source("some-doc", tmp_path / "absent")])


@pytest.mark.slow
@pytest.mark.skipif(not all(source.folder.is_dir() for source in SOURCES), reason="needs the documentation packages")
def test_smoke_run_writes_a_model_folder(tmp_path: Path) -> None:
    script = ROOT / "demo_model" / "train_demo_model.py"
    subprocess.run([sys.executable, str(script), "--smoke", "--threads", "1", "--out", str(tmp_path)], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
