"""OpenAI's own client at the gateway of the running server: the same tokens as gRPC, and hang-ups."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from transformers import AutoModel, AutoTokenizer

from support.gateway.running_gateway import gateway_to
from support.triton.serving import (
    WEIGHTS,
    Server,
    free_ports,
    wait_for,
)
from tidewheel_client import Client, Completion
from tidewheel_process.current_process import raise_descriptor_limit

pytestmark = pytest.mark.e2e

PROMPT = "The Python interpreter is"
CHAT: list[Any] = [{"role": "user", "content": "What is a tuple?"}]
LONG: dict[str, Any] = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
NUM_RANDOM = 500 if os.environ.get("TIDEWHEEL_LONG") else 24


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.openai}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def grpc_client(server: Server) -> Iterator[Client]:
    with Client(server.grpc, model="demo", timeout_s=60) as one:
        yield one


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "tidewheel"


def test_chat(client: openai.OpenAI, grpc_client: Client) -> None:
    expected = grpc_client.generate(messages=CHAT, max_tokens=30, temperature=0)
    answer = client.chat.completions.create(model="demo", messages=CHAT, max_completion_tokens=30, temperature=0)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        expected.num_input_tokens,
        expected.num_output_tokens,
    )
    again = client.chat.completions.create(model="demo", messages=[*CHAT, *answer_as_messages(answer)], max_tokens=1)
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("more", [{"prompt": [""] * 20}, {"prompt": ["x"] * 20, "extra_body": {"deadline_ms": 1}}])
def test_many_prompts_that_fail_at_once_end_alone(
    server: Server, client: openai.OpenAI, more: dict[str, Any]
) -> None:
    """Triton 2.51 dies if a stream is cancelled as its error is sent."""
    triton = server.triton_process()
    for _ in range(10):
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="demo", max_tokens=400, **more)
        assert caught.value.status_code in (400, 504)
    assert server.triton_process() == triton


def answer_as_messages(answer: Any) -> list[Any]:
    return [answer.choices[0].message.model_dump(), {"role": "user", "content": "And a list?"}]


def test_cached_tokens(client: openai.OpenAI) -> None:
    prompt = "One prompt that two requests share, and that is longer than a few blocks of the cache. " * 4
    for stream in (False, True):
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        for _ in range(2):
            answer: Any = client.completions.create(model="demo", prompt=prompt, max_tokens=2, **options)
            usage = (list(answer)[-1] if stream else answer).usage
        assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens % 16 == 0


def random_request(seed: int) -> dict[str, Any]:
    """Return a request's parameters, chosen from all that a client may send."""
    choose = random.Random(seed)
    every: dict[str, Any] = {
        "temperature": choose.choice([0.0, 0.7, 1.3]),
        "top_p": choose.choice([0.5, 0.95]),
        "top_k": choose.choice([1, 20]),
        "min_p": 0.05,
        "presence_penalty": choose.choice([-0.5, 1.5]),
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "stop": choose.choice([[" the"], ["."], ["zzz", "\n"]]),
        "stop_token_ids": [5, 17],
        "bad_words": [" a"],
        "logit_bias": {str(choose.randrange(4000)): choose.choice([-100, 5])},
        "min_tokens": 3,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "n": choose.choice([2, 3]),
        "logprobs": choose.choice([0, 3]),
        "priority": choose.choice([1, 4]),
        "deadline_ms": 60_000,
        "cache_salt": "salt",
    }
    chosen = {name: value for name, value in every.items() if choose.random() < 0.4}
    return {"max_tokens": choose.randrange(3, 24), "seed": seed, **chosen}


def of_openai(choice: dict[str, Any]) -> tuple[Any, ...]:
    logprobs = choice["logprobs"] or {}
    return choice["text"], choice["finish_reason"], choice["token_ids"], logprobs.get("token_logprobs")


def of_grpc(one: Completion) -> tuple[Any, ...]:
    chosen = None if one.logprobs is None else [next(iter(entry.values())).logprob for entry in one.logprobs]
    # Steps of other sizes round otherwise.
    return one.text, one.finish_reason, list(one.token_ids or ()), chosen and pytest.approx(chosen, abs=1e-4)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the choices of a stream that belong to one sequence."""
    logprobs = [lp for part in parts if part["logprobs"] for lp in part["logprobs"]["token_logprobs"]]
    return {
        "text": "".join(part["text"] for part in parts),
        "finish_reason": parts[-1]["finish_reason"],
        "token_ids": [token for part in parts for token in part["token_ids"]],
        "logprobs": {"token_logprobs": logprobs} if any(part["logprobs"] for part in parts) else None,
    }


def test_random_requests_equal_those_of_grpc(client: openai.OpenAI, grpc_client: Client) -> None:
    def compare(seed: int) -> None:
        params = random_request(seed)
        wants_logprobs = "logprobs" in params
        expected = grpc_client.generate_all(PROMPT, **params, return_token_ids=True, return_logprobs=wants_logprobs)
        body = {"model": "demo", "prompt": PROMPT}
        extra = {**params, "return_token_ids": True}
        whole = client.completions.create(**body, extra_body=extra)
        assert [of_openai(one.model_dump()) for one in whole.choices] == [of_grpc(one) for one in expected], params
        parts = [
            part.choices[0].model_dump() for part in client.completions.create(**body, stream=True, extra_body=extra)
        ]
        streams = [joined([part for part in parts if part["index"] == one.index]) for one in expected]
        assert [of_openai(one) for one in streams] == [of_grpc(one) for one in expected], params

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(compare, range(NUM_RANDOM)))) == NUM_RANDOM


def test_errors(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> None:
        client.chat.completions.create(**{"model": "demo", "messages": CHAT, "max_tokens": 1, **fields})

    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"unknown parameter 'max_tokns'.*did you mean 'max_tokens'"):
        ask(extra_body={"max_tokns": 4})
    with pytest.raises(openai.BadRequestError, match="temperature is 200") as wrong:
        ask(temperature=200, stream=True)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema cannot be followed.*not"):
        ask(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}})
    with pytest.raises(openai.BadRequestError, match="top_logprobs is 99: it must be 0 to 20") as wrong:
        ask(logprobs=True, top_logprobs=99)
    assert wrong.value.param == "top_logprobs"
    ask(max_completion_tokens=1)  # both, as LiteLLM sends them
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 1, and max_completion_tokens is 2: send one"):
        ask(max_completion_tokens=2)
    with pytest.raises(openai.BadRequestError) as long:
        ask(messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"


def test_an_echo_with_the_probabilities_of_the_prompt(client: openai.OpenAI, grpc_client: Client) -> None:
    """A text is scored as harnesses do it: its tokens are as likely as when they were generated."""
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    chosen = client.completions.create(prompt=PROMPT, **{**fields, "max_tokens": 8}).choices[0]
    text = PROMPT + chosen.text
    (scored,) = client.completions.create(prompt=text, echo=True, **fields).choices
    assert scored.text.startswith(text)
    assert scored.logprobs is not None and chosen.logprobs is not None
    assert scored.logprobs.tokens is not None and scored.logprobs.token_logprobs is not None
    assert "".join(scored.logprobs.tokens) == scored.text
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-9:-1] == pytest.approx(chosen.logprobs.token_logprobs, abs=1e-3)
    assert_only_scored(client, text, scored.logprobs)
    first, *_ = client.completions.create(prompt=text, echo=True, stream=True, **fields)
    assert first.choices[0].text.startswith(text)
    completion = grpc_client.generate(text, max_tokens=1, prompt_logprobs=2, allowed_token_ids=[5])
    assert completion.prompt_logprobs is not None and completion.token_ids is None
    assert [next(iter(entry.values())).decoded_token for entry in completion.prompt_logprobs] == (
        scored.logprobs.tokens[:-1]
    )
    cut = client.completions.create(
        prompt=text, echo=True, **fields, extra_body={"truncate_prompt_tokens": 2, "allowed_token_ids": [5]}
    )
    assert cut.usage is not None and cut.usage.prompt_tokens == 2
    assert cut.choices[0].text.startswith("".join(scored.logprobs.tokens[-3:-1]))


def assert_only_scored(client: openai.OpenAI, text: str, expected: Any) -> None:
    """Without a token of output, the prompt is the whole answer."""
    fields: dict[str, Any] = {"model": "demo", "prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = client.completions.create(**fields)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens == expected.tokens[:-1]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected.token_logprobs[1:-1], abs=1e-3)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (0, len(choice.logprobs.tokens))
    events = list(client.completions.create(**fields, stream=True))
    assert "".join(event.choices[0].text for event in events) == text
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0: it must be") as refused:
        client.completions.create(**{**fields, "echo": False})
    assert refused.value.param == "max_tokens"


def test_embeddings(client: openai.OpenAI) -> None:
    """They are the last token's hidden state, as transformers computes it."""
    texts = [PROMPT, "A tuple", PROMPT * 8]
    answer = client.embeddings.create(model="demo", input=texts)
    model, tokenizer = AutoModel.from_pretrained(WEIGHTS, dtype=torch.float32), AutoTokenizer.from_pretrained(WEIGHTS)
    for text, one in zip(texts, answer.data, strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        assert one.embedding == pytest.approx((states / states.norm()).tolist(), abs=1e-4)
    few = client.embeddings.create(model="demo", input=PROMPT, dimensions=5, encoding_format="float")
    assert len(few.data[0].embedding) == 5
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2 * few.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="top_k does not go with the task embed") as wrong:
        client.embeddings.create(model="demo", input=PROMPT, extra_body={"top_k": 5})
    assert wrong.value.param == "top_k"


def test_tokens_of_a_text(server: Server, client: openai.OpenAI) -> None:
    def ask(path: str, **body: Any) -> Any:
        return requests.post(f"{server.openai}/{path}", json={"model": "demo", **body}, timeout=60).json()

    found = ask("tokenize", prompt=PROMPT, return_token_strs=True)
    tokens = found["tokens"]
    assert found["count"] == len(tokens) == len(found["token_strs"]) > 3
    assert found["max_model_len"] > 100
    assert ask("detokenize", tokens=tokens) == {"prompt": PROMPT}
    by_text, by_tokens = (
        client.completions.create(model="demo", prompt=prompt, max_tokens=3, temperature=0)
        for prompt in (PROMPT, tokens)
    )
    assert by_text.choices[0].text == by_tokens.choices[0].text
    chat = ask("tokenize", messages=CHAT)
    answer = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == chat["count"]
    assert ask("tokenize", messages=CHAT, add_generation_prompt=False)["count"] < chat["count"]
    assert ask("detokenize", tokens=[-1])["error"]["message"].startswith("tokens has token id -1")
    assert ask("tokenize", prompt="x", top_k=3)["error"]["param"] == "top_k"


def test_a_hang_up_frees_the_request(server: Server, client: openai.OpenAI) -> None:
    def num_cancelled() -> float:
        return server.metric("vllm:request_success_total", finished_reason="cancelled")

    before = num_cancelled()
    stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, n=16, **LONG)
    next(iter(stream))
    stream.close()
    wait_for(lambda: num_cancelled() > before, 60, "end of the stream")
    wait_for(lambda: server.metric("vllm:num_requests_running", model_name="demo") == 0, 60, "an idle server")
    body = json.dumps({"prompt": PROMPT, "n": 16, "max_tokens": 900, "ignore_eos": True})

    def is_cancelled() -> bool:
        """Hang up; perhaps after the answer, if the metrics told of the request late."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.openai_port)) as connection:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            wait_for(lambda: server.metric("vllm:num_requests_running", model_name="demo") > 0, 60, "its start")
        wait_for(lambda: server.metric("vllm:num_requests_running", model_name="demo") == 0, 60, "its end")
        return num_cancelled() > before + 1

    wait_for(is_cancelled, 60, "a request that was cancelled")

    def metrics() -> str:
        return requests.get(f"{server.openai}/metrics", timeout=60).text

    wait_for(lambda: "tidewheel_gateway_hang_ups_total 2" in metrics(), 60, "counts of both workers")
    assert "vllm:num_requests_running" in metrics()


def test_idle_and_unread_connections_keep_no_other_from_its_answer(server: Server, client: openai.OpenAI) -> None:
    def answer() -> str:
        return client.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0).choices[0].text

    def num_running() -> float:
        return server.metric("vllm:num_requests_running", model_name="demo")

    expected = answer()
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 900, "ignore_eos": True})
    raise_descriptor_limit()
    with contextlib.ExitStack() as held:
        for number in range(1064):
            connection = http.client.HTTPConnection("127.0.0.1", server.openai_port)
            held.callback(connection.close)
            connection.connect()
            if number < 64:  # whose answers are never read
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        wait_for(lambda: num_running() > 0, 60, "first streams")
        assert answer() == expected
    wait_for(lambda: num_running() == 0, 60, "blocks of streams whose clients are gone")


def test_a_gateway_of_its_own(server: Server, tmp_path: Path) -> None:
    """It has keys, and one of its two servers is not there."""
    port, dead = free_ports(2)
    (tmp_path / "keys.toml").write_text(
        f'[[keys]]\nname = "web"\nsha256 = "{hashlib.sha256(b"s3cret").hexdigest()}"\nmax_priority = 3\n'
    )
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", "--port", str(port)]
    command += ["--url", f"127.0.0.1:{dead}", "--url", f"{server.grpc},health={server.health_port}"]
    process = subprocess.Popen([*command, "--api-keys", str(tmp_path / "keys.toml")], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: is_ok(f"{url}/health"), 60, "gateway")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
            known = stranger.with_options(api_key="s3cret")
            for _ in range(3):
                answer = known.completions.create(model="demo", prompt=PROMPT, max_tokens=2)
                assert answer.choices[0].finish_reason == "length"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_two_servers_and_what_they_have_cached(server: Server, other: Server) -> None:
    """Prompts that share their beginning, and turns of a session, find it in the cache of one of two servers."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tidewheel.cli.main", "gateway", "--port", str(port)]
    command += ["--url", server.grpc, "--url", other.grpc]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    servers = (server, other)

    def asked() -> list[float]:
        return [one.metric("vllm:prompt_tokens_total") for one in servers]

    def cached(client: openai.OpenAI, prompt: str, **extra: object) -> int:
        answer = client.completions.create(model="demo", prompt=prompt, max_tokens=2, extra_body=extra)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return int(answer.usage.prompt_tokens_details.cached_tokens or 0)

    try:
        wait_for(lambda: is_ok(f"http://127.0.0.1:{port}/health"), 60, "gateway")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            shared = " ".join(f"a{number}" for number in range(230))  # more than a chunk of 1024 bytes
            found = [cached(client, f"{shared} {number}") for number in range(4)]
            assert found[0] == 0 and all(found[1:])
            text = "b0"
            turns = []
            for turn in range(3):
                text += " ".join(f" c{turn}{number}" for number in range(40))
                turns.append(cached(client, text, session_id="chat-7", session_ttl_s=60))
            assert turns[0] < turns[1] < turns[2]
            before = asked()
            with client.completions.create(model="demo", prompt=PROMPT, stream=True, **LONG) as stream:
                next(iter(stream))
                cached(client, "four apples")
            wait_for(lambda: all(now > then for now, then in zip(asked(), before, strict=True)), 60, "both servers")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def is_ok(url: str) -> bool:
    try:
        return requests.get(url, timeout=60).ok
    except requests.ConnectionError:
        return False


TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_responses(server: Server, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=20, temperature=0)
    options: dict[str, Any] = {"model": "demo", "temperature": 0}
    # A gateway without workers, which stores responses.
    with gateway_to(int(server.grpc.rpartition(":")[2])) as gateway:
        alone = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        first = alone.responses.create(input="What is a tuple?", max_output_tokens=20, **options)
        assert first.output_text == chat.choices[0].message.content
        options |= {"tools": [TOOL], "max_output_tokens": 60}
        called = alone.responses.create(
            input="Rome?", tool_choice="required", previous_response_id=first.id, **options
        )
        (call,) = called.output
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}]
        *_, last = alone.responses.create(input=output, previous_response_id=called.id, stream=True, **options)
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.usage.input_tokens > called.usage.input_tokens
        assert last.response.usage.input_tokens_details.cached_tokens > 0
        alone.close()
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type is 'web_search': only functions are offered"):
        client.responses.create(model="demo", input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="the gateway has several workers"):
        client.responses.create(model="demo", input="x", previous_response_id="resp_x")


def test_a_session_stays_while_its_tools_run(server: Server, client: openai.OpenAI, grpc_client: Client) -> None:
    def num_paused(count: int) -> None:
        wait_for(
            lambda: server.metric("tidewheel_sessions_paused", model_name="demo") == count, 60, f"{count} pauses"
        )

    asked: list[Any] = [{"role": "user", "content": "Which city is warmer? " * 20}]
    tools: Any = [{"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}]
    session: dict[str, Any] = {"extra_body": {"session_id": "agent", "tenant": "agents"}, "model": "demo"}
    called = client.chat.completions.create(messages=asked, tools=tools, tool_choice="required", **session)
    assert called.choices[0].finish_reason == "tool_calls"
    num_paused(1)
    (call,) = called.choices[0].message.tool_calls or ()
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    turns = [*asked, called.choices[0].message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(messages=turns, tools=tools, max_tokens=4, **session)
    assert called.usage is not None and after.usage is not None and after.usage.prompt_tokens_details is not None
    block_size = 16
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) > called.usage.prompt_tokens - 2 * block_size
    num_paused(0)
    grpc_client.pause_session("agent", ["weather"], tenant="agents")
    grpc_client.pause_session("another", ["weather"], tenant="agents")  # that is not kept
    num_paused(1)
    grpc_client.close_session("agent", tenant="agents")
    num_paused(0)


def test_messages(server: Server, client: openai.OpenAI) -> None:
    def ask(path: str = "", **fields: Any) -> Any:
        body = {"model": "demo", "messages": CHAT, **fields}
        return requests.post(f"{server.openai}/v1/messages{path}", json=body, timeout=60)

    chat = client.chat.completions.create(model="demo", messages=CHAT, max_tokens=20, temperature=0)
    answer = ask(max_tokens=20, temperature=0).json()
    text = answer["content"][0]["text"]
    assert text == chat.choices[0].message.content
    assert chat.usage is not None
    assert ask("/count_tokens").json() == {"input_tokens": chat.usage.prompt_tokens}
    words = text.split()
    stopped = ask(max_tokens=20, temperature=0, stop_sequences=[words[2], "never"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", words[2])
    assert stopped["content"][0]["text"] == text[: text.index(words[2])]
    tools = [{"name": "weather", "input_schema": TOOL["parameters"]}]
    called = ask(max_tokens=60, temperature=0, tools=tools, tool_choice={"type": "any"}).json()
    assert called["content"][0]["input"]["city"] in ("Paris", "Rome")
    assert called["stop_reason"] == "tool_use"
    refused = ask(max_tokens=9, tools=[{"type": "bash_20250124", "name": "bash"}])
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "only functions are offered" in refused.json()["error"]["message"]
