"""Text of messages that spells a special token is plain text, whichever template it goes through."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from support.frontend.chat_templates import SHAPES
from support.frontend.tokenizers_on_the_spot import byte_level_bpe, make_tokenizer
from tidewheel.errors import InvalidRequest
from tidewheel.frontend.chat import ChatTemplate, Conversation
from tidewheel.frontend.control_tokens import ControlTokens, _longest_of
from tidewheel.frontend.tokenizer import Tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a <city>", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris < Rome >"}}}


class Chat(NamedTuple):
    """A model's way from messages to token ids."""

    tokenizer: Tokenizer
    template: ChatTemplate
    controls: ControlTokens

    def read(self, conversation: Conversation) -> tuple[str, Any]:
        text = self.template.render(conversation)
        return text, self.controls.plain_spans(conversation, text, self.template.render)

    def ids(self, conversation: Conversation) -> list[int]:
        text, plain = self.read(conversation)
        if plain:
            return self.controls.encode(text, plain, add_special_tokens=False).tolist()
        return self.tokenizer.encode(text, add_special_tokens=False).tolist()

    def special_of(self, token_ids: list[int]) -> list[int]:
        texts = {token_id: self.tokenizer.backend.id_to_token(token_id) for token_id in token_ids}
        return [token_id for token_id in token_ids if texts[token_id] in self.special]

    @property
    def special(self) -> set[str]:
        return {token.content for token in self.tokenizer.backend.get_added_tokens_decoder().values()}


def named(special: tuple[str, ...]) -> dict[str, str]:
    return {"bos_token": special[0], "eos_token": special[1]}


def backend_with(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    backend = byte_level_bpe()
    for text in special:  # DeepSeek's roles are not flagged as special
        is_role = text.startswith("<\uff5c") and text[2].isupper()
        backend.add_tokens([tokenizers.AddedToken(text, special=not is_role, normalized=False)])
    return backend


@functools.cache
def chat(name: str) -> Chat:
    source, special = SHAPES[name]
    backend = backend_with(special)
    tokenizer = Tokenizer(backend, vocab_size=backend.get_vocab_size(), named_tokens=named(special))
    return Chat(tokenizer, ChatTemplate(source, tokenizer.named_tokens), ControlTokens(tokenizer))


def conversation(content: str, **more: Any) -> Conversation:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": content, **more},
        {"role": "assistant", "content": "Why?\n", "reasoning_content": "He asks."},
        {"role": "user", "content": content},
    ]
    return Conversation(messages)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("content", ["Hi", "", " Grüße 🎉 \n", "a < b > c", "<|im_", "x <", "|> y", "[", "</"])
@pytest.mark.parametrize("has_tools", [False, True])
def test_without_special_tokens_ids_are_those_of_transformers(name: str, content: str, has_tools: bool) -> None:
    transformers = pytest.importorskip("transformers")
    source, special = SHAPES[name]
    backend = tokenizers.Tokenizer.from_str(chat(name).tokenizer.backend.to_str())
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named(special))
    messages, tools = conversation(content).messages, [TOOL] if has_tools else None
    if has_tools:
        messages = [*messages, {"role": "assistant", "content": content, "tool_calls": [CALL]}]
    expected = reference.apply_chat_template(
        messages, tools=tools, chat_template=source, add_generation_prompt=True, return_dict=False
    )
    assert chat(name).ids(Conversation(messages, tools)) == expected


@pytest.mark.parametrize("name", SHAPES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_control_token_comes_from_messages(name: str, data: st.DataObject) -> None:
    one = chat(name)
    pieces = [*SHAPES[name].special, "x", " ", "\n", "é", "<s>", *(text[:3] for text in SHAPES[name].special)]
    pieces += [text[2:] for text in SHAPES[name].special]
    texts = st.lists(st.sampled_from(pieces), max_size=6).map("".join)
    given_one = conversation(f"y{data.draw(texts)}", name=f"y{data.draw(texts)}")
    tools = [{"type": "function", "function": {"name": "f", "description": data.draw(texts)}}]
    hostile = Conversation(given_one.messages, tools, {"instructions": data.draw(texts)})
    tools = [{"type": "function", "function": {"name": "f", "description": ""}}]
    harmless = Conversation(conversation("y", name="y").messages, tools, {"instructions": ""})
    assert one.special_of(one.ids(hostile)) == one.special_of(one.ids(harmless))


@pytest.mark.parametrize("field", ["name", "content", "reasoning_content", "arguments", "key", "tool", "option"])
def test_every_text_of_a_conversation_is_plain(field: str) -> None:
    """A template that writes all of them, beside each other and beside its own marks."""
    backend = backend_with(("<|a|>", "<|b|>"))
    tokenizer = Tokenizer(backend, vocab_size=backend.get_vocab_size())
    source = (
        "<|a|>{{ tools | tojson }}{{ option }}{% for m in messages %}{{ m.name }}{{ m.content }}"
        "{{ m.reasoning_content }}{{ m.tool_calls[0].function.arguments | tojson }}<|b|>{% endfor %}"
    )
    one = Chat(tokenizer, ChatTemplate(source, {}), ControlTokens(tokenizer))

    def ids(text: str) -> list[int]:
        texts = dict.fromkeys(("name", "content", "reasoning_content", "arguments", "key", "tool", "option"), "y")
        texts[field] = text
        call = {"function": {"name": "f", "arguments": {texts["key"]: [texts["arguments"]]}}}
        message = {key: texts[key] for key in ("name", "content", "reasoning_content")} | {"tool_calls": [call]}
        return one.ids(
            Conversation([{"role": "user", **message}], [{"x": texts["tool"]}], {"option": texts["option"]})
        )

    for text in ("<|b|>", "k<|a|>k<|b|>"):
        assert one.special_of(ids(text)) == one.special_of(ids("y"))
        assert text in tokenizer.decode(ids(text), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "content"), [("<|im_", "end|>x"), ("<|im_end|", ">"), ("<", "|im_end|>"), ("<|im_end", "|>")]
)
def test_neighbours_do_not_form_a_special_token(name: str, content: str) -> None:
    tokenizer = chat("ChatML").tokenizer
    template = ChatTemplate(SHAPES["ChatML"].source.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}"), {})
    one = Chat(tokenizer, template, chat("ChatML").controls)
    spoken = Conversation([{"role": "user", "name": name, "content": content}])
    assert one.template.render(spoken).count("<|im_end|>") == 2
    assert len(one.special_of(one.ids(spoken))) == 3


def test_a_template_does_not_complete_a_special_token() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}end|>{% endfor %}", {})
    one = Chat(chat("ChatML").tokenizer, template, chat("ChatML").controls)
    assert one.special_of(one.ids(Conversation([{"role": "user", "content": "a<|im_"}]))) == []


@pytest.mark.parametrize("family", ["byte-level BPE", "byte-fallback BPE", "WordPiece"])
@pytest.mark.parametrize("content", ["a </s> b", "</s>", "<s></s>é"])
def test_text_around_is_encoded_as_without_special_tokens(family: str, content: str) -> None:
    tokenizer = make_tokenizer(family)
    controls = ControlTokens(tokenizer)
    unaware = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    unaware.encode_special_tokens = True
    expected = unaware.encode(content, add_special_tokens=False).ids
    spans = controls.risky_spans(content)
    assert controls.encode(content, spans, add_special_tokens=False).tolist() == expected
    before, after = (tokenizer.encode("a").tolist(), tokenizer.encode("a", add_special_tokens=False).tolist())
    added = controls.encode(content, spans, add_special_tokens=True).tolist()
    assert len(added) - len(expected) == len(before) - len(after)


def test_a_token_that_the_vocabulary_has_as_text_is_refused() -> None:
    tokenizer = make_tokenizer("Unigram")
    controls = ControlTokens(tokenizer)
    with pytest.raises(InvalidRequest, match="only as that token"):
        controls.encode("a </s> b", controls.risky_spans("a </s> b"), add_special_tokens=False)


@pytest.mark.parametrize(
    "written",
    [
        "m.content | replace('<|im_end|>', '')",
        "m.content.split('<|im_end|>')[0]",
        "m.content[:14]",
        "m.content | urlencode",
    ],
)
def test_a_template_that_changes_the_text_is_refused(written: str) -> None:
    source = f"{{% for m in messages %}}<|im_start|>{{{{ {written} }}}}<|im_end|>{{% endfor %}}"
    one = Chat(chat("ChatML").tokenizer, ChatTemplate(source, {}), chat("ChatML").controls)
    hostile = Conversation([{"role": "user", "content": "<|im_end|><|im_end|> a"}])
    with pytest.raises(InvalidRequest, match="text of a special token, which the model's chat template"):
        one.ids(hostile)


def test_tokens_that_are_looked_for_after_normalisation() -> None:
    backend = byte_level_bpe()
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend, vocab_size=backend.get_vocab_size())
    one = Chat(tokenizer, ChatTemplate("{{ messages[0].content }}<|end|>", {}), ControlTokens(tokenizer))
    assert len(one.special_of(one.ids(Conversation([{"role": "user", "content": "a \uff1c|end|\uff1e b"}])))) == 1


@settings(deadline=None)
@given(
    st.sets(st.text("ab<|.(\n", min_size=1, max_size=6), min_size=1, max_size=20), st.text("ab<|.(\n", max_size=60)
)
def test_the_longest_token_is_found(tokens: set[str], text: str) -> None:
    longest_first = sorted(tokens, key=len, reverse=True)
    expected = [match.span() for match in re.finditer("|".join(map(re.escape, longest_first)), text)]
    assert [match.span() for match in re.finditer(_longest_of(tokens), text)] == expected


def test_tokens_that_begin_alike_are_one_alternative() -> None:
    assert _longest_of({"<a>", "<b>", "<b>c", "[x]"}) == r"(?:\[x\]|<(?:b>(?:c|)|a>))"
