"""A real model, SmolLM2-135M-Instruct, where `make demo` has brought it: the same answers on every path."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests

from support.models.tiny_models import MARGIN, greedy
from support.triton.serving import ROOT, Server, start_server, stop_server, wait_ready
from tidewheel import LLM, SamplingParams
from tidewheel_client import Client

MODEL = ROOT / "build/smollm2"
NUM_TOKENS = 12
SUBJECTS = (
    "the sea", "a tuple", "bread", "the moon", "a friend", "rain", "the number seven", "music", "a train", "winter",
)  # fmt: skip
ASKED = ("What is {}?", "Write one sentence about {}.", "Is {} old?", "Which word goes with {}?", "Describe {}.")
QUESTIONS = [question.format(subject) for subject in SUBJECTS for question in ASKED]  # 50
CLOSE_LOGITS = 0.25  # of bfloat16: rounding may choose the other one
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not MODEL.is_dir(), reason="no build/smollm2: make chat-model brings it"),
]


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    model.generation_config.eos_token_id = None  # answers have one length
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        list(tokenizer.apply_chat_template(messages(q), add_generation_prompt=True, return_dict=True)["input_ids"])
        for q in QUESTIONS
    ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = [f"--set={setting}" for setting in (f"dtype={dtype}", "max_model_len=2048", "num_threads=1")]
    log = tmp_path_factory.mktemp("conversation") / "log"
    running = start_server("--model", str(MODEL), "--model-name", "demo", *settings, log=log, with_gateway=True)
    yield wait_ready(running)
    stop_server(running)


@pytest.fixture(scope="module")
def in_process(dtype: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of `LLM`, each prompt alone."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(MODEL), dtype=dtype, max_model_len=2048, num_threads=1, enable_prefix_caching=False) as llm:
        return [llm.generate([{"input_ids": ids}], params, use_tqdm=False)[0].token_ids for ids in prompts]


def same_or_close(reference: Any, prompt: list[int], ours: list[int], theirs: list[int], close: float) -> bool:
    """Return whether answers agree up to a token for which the reference has two logits that are close."""
    apart = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if apart is None:
        return True
    context = np.array(prompt + theirs[:apart], dtype=np.int32)
    return greedy(reference, context, 1).margin < close


@pytest.mark.slow
def test_answers_are_those_of_transformers(
    dtype: str, reference: Any, prompts: list[list[int]], in_process: list[list[int]]
) -> None:
    close = MARGIN if dtype == "float32" else CLOSE_LOGITS
    expected = [greedy(reference, np.array(ids, dtype=np.int32), NUM_TOKENS).tokens for ids in prompts]
    rows = zip(QUESTIONS, prompts, in_process, expected, strict=True)
    assert not [q for q, ids, ours, theirs in rows if not same_or_close(reference, ids, ours, theirs, close)]


@pytest.mark.slow
def test_triton_and_the_gateway_give_the_answers_of_llm(
    dtype: str, server: Server, reference: Any, prompts: list[list[int]], in_process: list[list[int]]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    close = MARGIN if dtype == "float32" else CLOSE_LOGITS
    with Client(server.grpc, "demo") as client:
        through_triton = [
            list(client.chat(messages(q), max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True,
                             return_token_ids=True).token_ids or ())
            for q in QUESTIONS
        ]  # fmt: skip
    for question, ids, ours, triton in zip(QUESTIONS, prompts, in_process, through_triton, strict=True):
        assert same_or_close(reference, ids, triton, ours, close), question
        body = {
            "model": "demo", "messages": messages(question), "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        answer = requests.post(f"{server.openai}/v1/chat/completions", json=body, timeout=60).json()
        text = answer["choices"][0]["message"]["content"]
        if text != tokenizer.decode(triton, skip_special_tokens=True):
            assert greedy(reference, np.array(ids, dtype=np.int32), NUM_TOKENS).margin < close, question


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"guided_json": {"type": "object"}},
        {"structured_outputs": {"json_object": True}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_json_is_not_filled_with_whitespace(server: Server, asked: dict[str, Any]) -> None:
    """With whitespace of any length, the model indents thirty nested objects until the answer is cut."""
    question = messages("Write a JSON object with thirty nested objects.")
    body = {"model": "demo", "messages": question, "max_tokens": 60, "temperature": 0, **asked}
    answer = requests.post(f"{server.openai}/v1/chat/completions", json=body, timeout=300).json()["choices"][0]
    between_strings = re.sub(r'"(\\.|[^"\\])*("|$)', '""', answer["message"]["content"])
    assert between_strings.startswith("{")
    assert not re.search(r"[^\S ]|  ", between_strings)


# --- make demo ---------------------------------------------------------------------------------------------------


def demo() -> list[str]:
    options = ("--model", str(MODEL), "--max-tokens", "16")
    return [sys.executable, "-m", "tidewheel.cli.main", "demo", *options]


def test_the_demo_asks_two_questions_and_ends() -> None:
    done = subprocess.run(demo(), cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^> .*\?$|^> .*\.$", done.stdout, re.MULTILINE)) == 2
    assert "Paris" in done.stdout
    assert "playground" not in done.stdout


def test_in_a_terminal_the_conversation_goes_on() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(demo(), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = read_until(ours, b"Ctrl-D ends the demo.")
    (page,) = re.findall(rb"http://[\d.:]+/playground", said)
    assert requests.get(page.decode(), timeout=60).ok
    assert re.search(rb"tidewheel chat --url [\d.:]+ --model demo", said)
    os.write(ours, b"And of Italy?\n")
    assert b"tokens in, 16 out" in read_until(ours, b"ended by")
    os.write(ours, b"\x04")
    read_until(ours, b"tidewheel: stopping")
    assert process.wait(60) == 0
    os.close(ours)


def read_until(descriptor: int, words: bytes) -> bytes:
    said = b""
    while words not in said:
        chunk = os.read(descriptor, 4096)
        assert chunk, said
        said += chunk
    return said
