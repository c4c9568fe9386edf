"""Validity of tool calls that a random model makes, by format, choice of tools and place of its thoughts.

    python benchmarks tool_calls --save

The model draws from the tokens that the grammar allows, at every third step from those that have a character of
JSON's or of a mark, and likes to go on with marks. Requests are read, and answers written, as the gateway and the
backend do, but without a network. Odd runs have a tokenizer without tokens for marks: the model spells them. Each
answer is written as a stream and whole, which must be the same.

cut             answers that their length ended; all others must follow the schemas of the functions that they call
several_tokens  calls whose arguments took several tokens
begun_early     those of them whose first argument bytes came before the last
"""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from common.study import Study, show
from tidewheel.frontend.chat import parse_conversation
from tidewheel.frontend.prompt_workers import GrammarJob, JobRunner, RenderJob, TokenizerFolder
from tidewheel.frontend.tokenizer import Detokenizer
from tidewheel.gateway.answers import TextWriter
from tidewheel.gateway.bodies import UpstreamRequest, read_chat
from tidewheel.gateway.output_parser import Reasoning
from tidewheel.grammar import TokenGrammar
from tidewheel.runner.grammar_compiler import GrammarCompiler
from tidewheel.tool_formats import CALL_MARKS, SILENT_MARKS, THOUGHT_MARKS
from tidewheel_client import Chunk

NUM_RUNS = 500  # of each case
MOST_TOKENS = 800
CHOICES = ("auto", "named", "required", "parallel")
END = "<|endoftext|>"
_MARKS = [
    *CALL_MARKS,
    *SILENT_MARKS,
    *THOUGHT_MARKS.keys(),
    *THOUGHT_MARKS.values(),
    '{"name": "weather", "arguments": ',
    "</arg_value>",
    "\n</parameter>\n",
    "</function>",
    "</tool_call>",
]
_BEGINNINGS = {mark[:length] for mark in _MARKS for length in range(1, len(mark))}
_LONGEST = max(map(len, _MARKS))

# Marks of a template, and those that are tokens of their own.
_DEEPSEEK = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Qwen3": ("<tool_call></tool_call>", ("<tool_call>", "</tool_call>")),
    "Llama 3": ("<|start_header_id|>", ("<|python_tag|>",)),
    "Mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",)),
    "Mistral, named": ("[TOOL_CALLS][ARGS]", ("[TOOL_CALLS]", "[ARGS]")),
    "GPT-OSS": (
        "<|channel|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>"),
    ),
    "DeepSeek": (_DEEPSEEK[0], _DEEPSEEK),
    "DeepSeek, blocks": (f"{_DEEPSEEK[0]} ```json", _DEEPSEEK),
    "GLM": ("<arg_key></arg_key>\n<arg_value>", _GLM),
    "GLM, together": ("<arg_key></arg_key><arg_value>", _GLM),
    "Qwen3-Coder": ("<tool_call><function=<parameter=", ("<tool_call>", "</tool_call>")),
    "no tools": ("", ()),
}
# Texts after the question, and how the gateway is told to read thoughts.
THOUGHTS: dict[str, tuple[str, Reasoning]] = {
    "none": ("", "tagged"),
    "before": ("{# </think> #}", "tagged"),
    "begun": ("<think>\n{# </think> #}", "always"),
    "over": ("<think>\n\n</think>\n\n", "tagged"),
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {"city": {"enum": ["Paris", "Rome", 'a "b" <tool_call> }']}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "order": {
        "type": "object",
        "properties": {
            "lines": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {
                        "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                        "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                        "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 1000},
                    },
                    "required": ["sku", "quantity"],
                    "additionalProperties": False,
                },
            },
            "gift": {"type": "boolean"},
            "note": {"type": "string", "maxLength": 20},
        },
        "required": ["lines", "gift"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 8},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "additionalProperties": False,
    },
    "contact": {
        "type": "object",
        "properties": {
            "by": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"phone": {"type": "string", "pattern": "^\\+[0-9]{6,9}$"}},
                        "required": ["phone"],
                        "additionalProperties": False,
                    },
                    {"type": "null"},
                    {"type": "array", "items": {"const": "letter"}, "minItems": 2, "maxItems": 2},
                ]
            },
            "when": {"type": "string", "format": "date"},
            "level": {"type": ["integer", "null"], "minimum": -3, "maximum": 3},
        },
        "required": ["by", "level"],
        "additionalProperties": False,
    },
    "now": {},
}


class Case(NamedTuple):
    format: str
    choice: str
    thoughts: str


class Tally(NamedTuple):
    runs: int
    cut: int
    calls: int
    with_thoughts: int
    invalid: int
    several_tokens: int
    begun_early: int


def cases() -> Iterator[Case]:
    """Yield all cases. GPT-OSS has thoughts of its own."""
    for name, choice, thoughts in itertools.product(FORMATS, CHOICES, THOUGHTS):
        if name != "GPT-OSS" or thoughts == "none":
            yield Case(name, choice, thoughts)


class RandomModel:
    """Tokenizer, template and random draws of a model."""

    def __init__(self, folder: Path, case: Case, *, has_marks: bool) -> None:
        marks, tokens = FORMATS[case.format]
        prompt_end, self.reasoning = THOUGHTS[case.thoughts]
        backend = _tokenizer()
        added = [*tokens, "<think>", "</think>", "<odd>"] if has_marks else []
        backend.add_tokens([tokenizers.AddedToken(text, special=text.startswith(("<|", "["))) for text in added])
        backend.add_special_tokens([END])
        backend.save(str(folder / "tokenizer.json"))
        template = f"{{{{ tools | tojson }}}}{{{{ messages[0].content }}}}{{# {marks} #}}{prompt_end}"
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        self._size = backend.get_vocab_size()
        self._end = backend.token_to_id(END)
        self.jobs = JobRunner(TokenizerFolder(folder, self._size, 1 << 20))
        self._compiler = GrammarCompiler(folder, self._size)
        self._compiled, self._after = cache(self._compile), cache(self._tokens_after)
        self._texts = [self.jobs.tokenizer.token_text(token_id) for token_id in range(self._size)]
        self._likes = np.array([_is_structure(text) for text in self._texts])

    def _compile(self, messages: str) -> tuple[TokenGrammar, np.ndarray]:
        answer = self.jobs.run(RenderJob(parse_conversation(messages)))
        assert answer.grammar is not None
        source = self.jobs.run(GrammarJob(answer.grammar)).text
        return self._compiler.compile(source, "tools"), self.jobs.tokenizer.encode(answer.text)

    def _of_marks(self, said: str) -> np.ndarray:
        """Return which tokens go on with a mark that the text has begun; at the beginning, those that begin one."""
        found = np.zeros(self._size, bool)
        for begun in {said[-length:] for length in range(1, _LONGEST)} & _BEGINNINGS if said else [""]:
            found |= self._after(begun)
        return found

    def _tokens_after(self, begun: str) -> np.ndarray:
        rests = [mark.removeprefix(begun) for mark in _MARKS if mark.startswith(begun)]
        return np.array([bool(text) and any(rest.startswith(text) for rest in rests) for text in self._texts])

    def chunks(self, messages: str, seed: int) -> Iterator[Chunk]:
        """Yield an answer token by token."""
        grammar, prompt_ids = self._compiled(messages)
        draws, matcher = random.Random(seed), grammar.matcher(())
        detokenizer, said = Detokenizer(self.jobs.tokenizer, prompt_ids, skip_special_tokens=False), ""
        for number in itertools.count(1):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").astype(bool)
            may_end, allowed = bits[grammar.end_bit], bits[: self._size].copy()
            allowed[self._end] = may_end
            liked = allowed & self._likes if draws.random() < 1 / 3 else allowed
            if draws.random() < 0.8 and (goes_on := allowed & self._of_marks(said)).any():
                liked = goes_on
            token_id = int(draws.choice(np.flatnonzero(liked if liked.any() else allowed)))
            if token_id == self._end or number == MOST_TOKENS:
                reason = "stop" if token_id == self._end else "length"
                yield Chunk(text=detokenizer.flush(), finish_reason=reason, num_output_tokens=number)
                return
            assert matcher.consume_token(token_id), matcher.get_error()
            text = detokenizer.push([token_id])
            said = (said + text)[-_LONGEST:]
            yield Chunk(text=text)


def _is_structure(text: str) -> bool:
    return text == END or not set(text).isdisjoint('<>"{}[]:,')


@cache
def _trained() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        json.dumps(SCHEMAS),
        '{"name": "weather", "arguments": {"city": "Paris"}}',
        "tool _call> think> ü日",
    ]
    texts += [mark for marks in FORMATS.values() for mark in marks[1]]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts * 3, trainer)
    return str(backend.to_str())


def _tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_trained())


def body_of(case: Case, seed: int) -> dict[str, Any]:
    """Return the body of a chat about two functions, both strict where the model chooses whether to call."""
    names = random.Random(f"names {seed % 8}").sample(list(SCHEMAS), 2)
    strict = {"strict": True} if case.choice == "auto" else {}
    functions = [{"name": name, "parameters": SCHEMAS[name], **strict} for name in names]
    named = {"type": "function", "function": {"name": names[0]}}
    choices: dict[str, Any] = {"auto": "auto", "named": named, "required": "required", "parallel": "required"}
    return {
        "messages": [{"role": "user", "content": "Go."}],
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choices[case.choice],
        "parallel_tool_calls": case.choice in ("auto", "parallel"),
    }


def answer(model: RandomModel, case: Case, seed: int) -> tuple[dict[str, Any], dict[str, Any], list[list[int]]]:
    """Return a choice with its message, whole and streamed, and the events with arguments by call."""
    request = replace(read_chat(body_of(case, seed)), reasoning=model.reasoning)
    chunks = list(model.chunks(str(request.prompts[0]["messages"]), seed))
    whole = TextWriter(request).whole([(0, chunk) for chunk in chunks])
    asked = replace(read_chat(body_of(case, seed) | {"stream": True}), reasoning=model.reasoning)
    streamed, events = _streamed(asked, chunks)
    return json.loads(whole)["choices"][0], streamed, events


def _streamed(request: UpstreamRequest, chunks: Sequence[Chunk]) -> tuple[dict[str, Any], list[list[int]]]:
    writer, message = TextWriter(request), dict[str, Any](content="", tool_calls=[])
    reason, events = None, list[list[int]]()
    for number, chunk in enumerate(chunks):
        for line in writer.events(0, [chunk]).split(b"\n\n")[:-1]:
            choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
            _add(message, events, choice["delta"], number)
            reason = choice["finish_reason"] or reason
    return {"message": message, "finish_reason": reason}, events


def _add(message: dict[str, Any], events: list[list[int]], delta: dict[str, Any], number: int) -> None:
    for key in ("content", "reasoning_content"):
        if key in delta:
            message[key] = message.get(key, "") + delta[key]
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            assert call["index"] == len(message["tool_calls"])
            message["tool_calls"].append(call)
            events.append([])
        else:
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if call["function"]["arguments"]:
            events[call["index"]].append(number)


def _difference(whole: dict[str, Any], streamed: dict[str, Any]) -> str:
    """Return how a whole answer and a stream differ."""
    parts = [
        (
            one["finish_reason"],
            one["message"]["content"] or "",
            one["message"].get("reasoning_content"),
            [call["function"] for call in one["message"].get("tool_calls", ())],
        )
        for one in (whole, streamed)
    ]
    return "" if parts[0] == parts[1] else f"the stream was {parts[1]}"


def problem(case: Case, seed: int, choice: dict[str, Any]) -> str:
    """Return what is wrong with an answer that its length did not end; empty: nothing."""
    message, names = choice["message"], [tool["function"]["name"] for tool in body_of(case, seed)["tools"]]
    calls, content = message.get("tool_calls", []), message["content"] or ""
    if case.choice != "auto" and not calls:
        return "no call"
    if case.choice in ("named", "required") and len(calls) != 1:
        return "several calls"
    if case.choice == "named" and calls[0]["function"]["name"] != names[0]:
        return "another function"
    if calls and choice["finish_reason"] != "tool_calls":
        return f"finish_reason {choice['finish_reason']}"
    if content.strip() and case.choice != "auto":
        return "words beside a forced call"
    if any(mark in content for mark in CALL_MARKS):
        return "a call in the words"
    for call in calls:
        function = call["function"]
        schema = {"type": "object"} | (SCHEMAS[function["name"]] or {"additionalProperties": False})
        try:
            jsonschema.validate(json.loads(function["arguments"]), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{function['name']}: {str(error)[:200]}"
    return ""


def run(case: Case, seeds: Sequence[int], *, complain: bool = True) -> Tally:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        kinds = [RandomModel(Path(one), case, has_marks=True), RandomModel(Path(other), case, has_marks=False)]
        for seed in seeds:
            choice, streamed, events = answer(kinds[seed % 2], case, seed)
            counts["runs"] += 1
            counts["calls"] += len(choice["message"].get("tool_calls", []))
            counts["with_thoughts"] += "reasoning_content" in choice["message"]
            several = [each for each in events if len(each) > 1]
            counts["several_tokens"] += len(several)
            counts["begun_early"] += sum(each[0] < each[-1] for each in several)
            if choice["finish_reason"] == "length":
                counts["cut"] += 1
            elif wrong := _difference(choice, streamed) or problem(case, seed, choice):
                counts["invalid"] += 1
                if complain:
                    print(case, seed, wrong, choice)
    return Tally(**{name: counts[name] for name in Tally._fields})


def main() -> None:
    study = Study("tool_calls", __doc__, "llguidance", "jsonschema")
    study.add_argument("--runs", type=int, default=NUM_RUNS, help="of each case")
    options = study.begin()
    all_cases = list(cases())
    with ProcessPoolExecutor() as pool:
        tallies = list(pool.map(run, all_cases, itertools.repeat(range(options.runs))))
    rows = [{**case._asdict(), **tally._asdict()} for case, tally in zip(all_cases, tallies, strict=True)]
    totals = {name: sum(row[name] for row in rows) for name in Tally._fields}
    show(rows)
    show([totals])
    study.save({"totals": totals, "cases": rows})


if __name__ == "__main__":
    main()
