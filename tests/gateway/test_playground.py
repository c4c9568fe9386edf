"""The playground, as a browser shows it, and as it is served."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway.browser import HAS_BROWSER, MISSING, Browser, browser
from support.gateway.running_gateway import RunningGateway, entry, gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, parameters, response, running
from tidewheel.cli.main import main
from tidewheel.errors import TAGS
from tidewheel.gateway import web_pages

FOLDER = Path(web_pages.__file__).with_name("playground")
FILES = ["", *(f"/{path.name}" for path in FOLDER.iterdir() if path.name != "index.html"), "/errors.json"]
needs_browser = pytest.mark.skipif(not HAS_BROWSER, reason=MISSING)
DOT = (  # a PNG file of 1 x 1
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
EVIL = "<img src=x onerror='document.title=1'><script>document.title=2</script>&amp;"


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeTriton]:
    with running(FakeTriton(models=("demo",))) as one:
        yield one


@pytest.fixture
def triton(fake: FakeTriton) -> FakeTriton:
    fake.answer = None
    fake.asked.clear()
    fake.ended.clear()
    return fake


@pytest.fixture(scope="module")
def gateway(fake: FakeTriton) -> Iterator[RunningGateway]:
    with gateway_to(fake.port, playground=True) as one:
        yield one


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def page(chromium: Browser, gateway: RunningGateway, triton: FakeTriton) -> Iterator[Browser]:
    chromium.driver.get(f"{gateway.url}/playground")
    chromium.run("localStorage.clear()")
    open_page(chromium)
    yield chromium
    assert chromium.problems() == []


def open_page(page: Browser) -> None:
    """Load the page anew."""
    page.driver.refresh()
    page.wait(lambda: page.find("#server").text == "1 model ready", "list of models")


def send(page: Browser, text: str = "one two three") -> None:
    page.fill("#prompt", text)
    page.find("#send").click()


def wait_end(page: Browser, number: int = 1) -> None:
    page.wait(
        lambda: len(page.texts(".turn .figures")) == number and page.texts(".turn .figures")[-1], "end of a turn"
    )


def figures(page: Browser) -> dict[str, str]:
    """Return those of the last answer."""
    last = ".turn:last-child .figures"
    return dict(zip(page.texts(f"{last} dt"), page.texts(f"{last} dd"), strict=True))


def say_twice(asked: Asked) -> Answer:
    for text, reason in (("Hello ", "None"), ("you", "stop")):
        yield response(
            asked.message,
            text_output=text,
            finish_reason=reason,
            num_input_tokens=("UINT32", "I", [7]),
            num_output_tokens=("UINT32", "I", [1]),
        )


# --- how it is served ----------------------------------------------------------------------------------------


def test_it_is_off_by_default(fake: FakeTriton) -> None:
    with gateway_to(fake.port) as plain:
        for name in FILES:
            assert plain.get(f"/playground{name}").status_code == 404
        assert "The playground, a page to try models, is off" in plain.get("/").text


def test_the_root_leads_to_the_page(gateway: RunningGateway) -> None:
    assert gateway.get("/").text == gateway.get("/playground").text


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_loaded_from_elsewhere(gateway: RunningGateway, name: str) -> None:
    answer = gateway.get(f"/playground{name}")
    assert answer.ok
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    text = answer.text
    assert not re.search(r"""(https?:)?//[a-z]|\bon[a-z]+="|<style|style=""", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<script(?! src=\"playground/)|@import|url\(", text)


def test_it_needs_no_key_and_shows_nothing_that_does(fake: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice"))
    with gateway_to(fake.port, keys=keys, playground=True) as guarded:
        assert all(guarded.get(f"/playground{name}").ok for name in FILES)
        for path in ("/v1/models", "/metrics", "/playgrounds", "/playground/../metrics"):
            assert guarded.get(path).status_code == 401
        assert guarded.get("/playground/other").status_code == 404


@pytest.mark.parametrize("name", ["other", "", "index.html", "x" * 300, "%00", "playground.js/x", "..%2fapi_keys.py"])
def test_any_other_name_is_an_unknown_url(gateway: RunningGateway, name: str) -> None:
    answer = gateway.get(f"/playground/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_files_are_utf_8(gateway: RunningGateway) -> None:
    kinds = {gateway.get(f"/playground{name}").headers["Content-Type"] for name in FILES}
    names = ("text/html", "text/css", "text/javascript", "application/json")
    assert kinds == {f"{name}; charset=utf-8" for name in names}


def test_every_tag_has_what_to_do(gateway: RunningGateway) -> None:
    remedies = gateway.get("/playground/errors.json").json()
    assert remedies.keys() == TAGS
    assert all(remedies.values())


# --- how it works in a browser -------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_chat_and_its_figures(page: Browser, triton: FakeTriton, is_streamed: bool) -> None:
    shown = threading.Event()

    def say_slowly(asked: Asked) -> Answer:
        first, second = say_twice(asked)
        yield first
        shown.wait(30)
        yield second

    triton.answer = say_slowly if is_streamed else say
    if not is_streamed:
        page.find("#stream").click()
    page.fill("#system", "Be short.")
    page.fill("#max-tokens", "50")
    page.fill("#temperature", "0.5")
    page.run("document.getElementById('priority').value = '1'")
    send(page, "first question")
    page.wait(lambda: not is_streamed or page.texts(".text") == ["Hello"], "first text")
    shown.set()
    wait_end(page)
    answer = "Hello you" if is_streamed else "ab"
    assert page.texts(".asked") == ["first question"]
    assert page.texts(".text") == [answer]
    found = figures(page)
    assert (found["tokens in"], found["tokens out"], found["finish"]) == ("7", "2", "stop")
    assert ("first token" in found) == ("tokens/s" in found) == is_streamed
    (asked,) = triton.asked
    assert asked.inputs["stream"] is is_streamed
    assert {name: asked.sampling[name] for name in ("max_tokens", "temperature", "priority")} == {
        "max_tokens": 50, "temperature": 0.5, "priority": 1,
    }  # fmt: skip
    assert found["request"] == asked.message.id
    send(page, "second question")
    wait_end(page, 2)
    assert [(one["role"], one["content"]) for one in json.loads(triton.asked[1].inputs["messages"])] == [
        ("system", "Be short."), ("user", "first question"), ("assistant", answer), ("user", "second question"),
    ]  # fmt: skip
    page.find("#clear").click()
    assert page.texts(".turn") == []


@needs_browser
def test_a_plain_prompt(page: Browser, triton: FakeTriton) -> None:
    page.find("input[value=prompt]").click()
    assert not page.find("#system").is_displayed()
    page.fill("#prompt", "one two three\n")  # the enter key sends
    wait_end(page)
    assert page.texts(".text") == ["one two three"]
    (asked,) = triton.asked
    assert asked.inputs["text_input"] == "one two three"


@needs_browser
def test_text_of_a_model_is_never_markup(page: Browser, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=f"<think>{EVIL}</think>{EVIL}")
    send(page, EVIL)
    wait_end(page)
    assert page.texts(".asked") == [EVIL]
    assert page.run("return document.querySelector('.text').textContent") == EVIL
    assert page.run("return document.querySelector('.thoughts pre').textContent") == EVIL
    assert page.run("return document.querySelectorAll('.turn img, .turn script').length") == 0
    assert page.driver.title == "Tidewheel playground"


MARKDOWN = """\
# Title of *it*
**Bold**, `x < y` and [a link](https://example.com/a), [no link](javascript:alert(1)) https://b.example/c?d.

1. one
2. two
   - nested

```html
<b>not bold</b>
```

| a | b |
|---|---|
| 1 | **2** |

> said
"""
SHOWN = {
    "h3": "Title of it", "h3 em": "it", "p strong": "Bold", "p code": "x < y", "ol > li ul > li": "nested",
    "pre code": "<b>not bold</b>", "thead th": "a", "td strong": "2", "blockquote p": "said",
}  # fmt: skip


@needs_browser
def test_an_answer_of_a_chat_is_markdown(page: Browser, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=MARKDOWN)
    send(page)
    wait_end(page)
    assert {selector: page.texts(f".text {selector}")[0] for selector in SHOWN} == SHOWN
    links = page.driver.find_elements("css selector", ".text a")
    assert [link.get_attribute("href") for link in links] == ["https://example.com/a", "https://b.example/c?d"]
    assert {(link.get_attribute("rel"), link.get_attribute("target")) for link in links} == {
        ("noopener noreferrer", "_blank")
    }
    assert "[no link](javascript:alert(1))" in page.texts(".text p")[0]
    page.find("input[value=prompt]").click()
    send(page)
    wait_end(page, 2)
    assert page.texts(".text")[1] == MARKDOWN.strip()


@needs_browser
def test_growing_markdown_is_as_if_it_came_at_once(page: Browser) -> None:
    assert page.run(
        """
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        showMarkdown(whole, arguments[0]);
        for (let end = 0; end <= arguments[0].length; end += 1) showMarkdown(grown, arguments[0].slice(0, end));
        return whole.innerHTML === grown.innerHTML && whole.children.length > 5;
        """,
        MARKDOWN,
    )


@needs_browser
def test_no_text_becomes_another_element_or_takes_long(page: Browser) -> None:
    pieces = [*"*_`~#>|![]()\\", "**", "```", "\n", "\n\n", "- ", "1. ", "  ", "\t", "|-|-|", "a", EVIL]
    pieces += ["https://x", "data:x", "javascript:x"]
    rng = random.Random(7)
    texts = ["".join(rng.choices(pieces, k=rng.randint(1, 60))) for _ in range(1500)]
    texts += [piece * 20_000 for piece in (*pieces, "- a\n", "**a ", "[a](", "[a](https://x ", "> ", "a|b\n-|-\n")]
    found = page.run(
        """
        const pane = document.createElement("div");
        for (const text of arguments[0]) pane.append(...blocksOf(text).map((source) => blockNode(source, 0)));
        const names = [...pane.querySelectorAll("*")].map((node) => node.tagName);
        const attributes = [...pane.querySelectorAll("*")].flatMap((node) => node.getAttributeNames());
        const links = [...pane.querySelectorAll("a")].map((node) => node.protocol);
        return [names, attributes, links].map((all) => [...new Set(all)]);
        """,
        texts,
    )
    names, attributes, links = map(set, found)
    assert names >= {"P", "CODE", "STRONG", "EM", "LI", "A", "TABLE"}
    assert names <= {
        "P", "H3", "H4", "H5", "H6", "HR", "BLOCKQUOTE", "UL", "OL", "LI", "PRE", "CODE", "STRONG", "EM", "DEL", "A",
        "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD",
    }  # fmt: skip
    assert attributes <= {"href", "title", "rel", "target", "start", "class"}
    assert links == {"https:"}


@needs_browser
def test_the_focus_and_what_is_read_out(page: Browser, triton: FakeTriton) -> None:
    assert page.run("return document.activeElement.id") == "prompt"
    triton.answer = say_twice
    page.fill("#prompt", "one\n")
    wait_end(page)
    text = page.find(".text")
    assert (text.get_attribute("aria-live"), text.get_attribute("aria-busy")) == ("polite", "false")
    assert page.run("return document.activeElement.id") == "prompt"


@needs_browser
def test_an_answer_is_copied_as_it_came(page: Browser, triton: FakeTriton) -> None:
    allowed = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.driver.execute_cdp_cmd("Browser.grantPermissions", allowed)
    triton.answer = lambda asked: say(asked, text_output="<think>Hm.</think>**Bold** `x`\n")
    send(page)
    wait_end(page)
    page.find(".copy").click()
    page.wait(lambda: page.texts(".copy") == ["Copied"], "a copy")
    assert page.run("return navigator.clipboard.readText()") == "**Bold** `x`\n"


@needs_browser
def test_the_last_answer_is_made_again(page: Browser, triton: FakeTriton) -> None:
    for number, text in enumerate(("first", "second"), start=1):
        triton.answer = lambda asked, text=text: say(asked, text_output=text)
        send(page, f"question {number}")
        wait_end(page, number)
    triton.answer = lambda asked: say(asked, text_output="third")
    (again,) = [one for one in page.driver.find_elements("css selector", ".again") if one.is_displayed()]
    again.click()
    page.wait(lambda: page.texts(".text") == ["first", "third"], "another answer")
    assert page.texts(".asked") == ["question 1", "question 2"]
    assert triton.asked[1].inputs["messages"] == triton.asked[2].inputs["messages"]


@needs_browser
def test_a_conversation_stays_until_it_is_cleared(page: Browser, triton: FakeTriton) -> None:
    triton.answer = lambda asked: say(asked, text_output=f"<think>Hm.</think>**{EVIL}**")
    page.fill("#system", "Be short.")
    send(page, "first")
    wait_end(page)
    shown = figures(page)
    triton.refuse_and_listen("[TW-BUSY] waiting set is full")
    send(page, "refused")
    wait_end(page, 2)
    open_page(page)
    assert page.texts(".asked") == ["first", "refused"]
    assert page.run("return document.querySelector('.text strong').textContent") == EVIL
    assert page.run("return document.querySelector('.thoughts pre').textContent") == "Hm."
    assert page.run("return document.querySelectorAll('.turn img, .turn script').length") == 0
    assert list(shown.values()) == page.texts("#turns .turn dd")[: len(shown)]
    assert page.texts(".error .tag") == ["", "TW-BUSY"]
    triton.answer = say
    send(page, "next")
    wait_end(page, 3)
    said = json.loads(triton.asked[-1].inputs["messages"])
    assert [(one["role"], one["content"]) for one in said] == [
        ("system", "Be short."), ("user", "first"), ("assistant", f"**{EVIL}**"), ("user", "next"),
    ]  # fmt: skip
    page.find("#clear").click()
    assert page.run("return localStorage.length") == 0
    open_page(page)
    assert page.texts(".turn") == []
    assert page.find("#empty").is_displayed()


@needs_browser
def test_what_the_browser_keeps_is_bounded_and_may_be_broken(page: Browser, triton: FakeTriton) -> None:
    page.run("localStorage.setItem('other', 'x'.repeat(5_200_000))")
    triton.answer = lambda asked: say(asked, text_output="y" * 30_000)
    for number in (1, 2, 3):
        send(page, f"question {number}")
        wait_end(page, number)
    open_page(page)
    assert page.texts(".asked") == ["question 3"]
    for broken in ("{", '{"turns": 7}', '{"turns": [7, null]}', '{"fields": 3}', '{"turns": [{"calls": 5}]}'):
        page.run("localStorage.setItem('tidewheel-playground', arguments[0])", broken)
        open_page(page)
        assert page.find("#send").is_displayed()
    assert (page.texts(".turn"), page.find("#empty").is_displayed()) == ([], True)


@needs_browser
def test_a_call_is_shown_and_its_result_is_sent(page: Browser, triton: FakeTriton) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "<b>Paris"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "weather"}}]
    page.fill("#tools", "{}")
    send(page, "weather?")
    assert page.find("#tools-problem").text.startswith("This is no list of tools")
    assert (triton.asked, page.find("#prompt").get_attribute("value")) == ([], "weather?")
    page.fill("#tools", json.dumps(tools))
    triton.answer = lambda asked: say(asked, text_output=f"<think>Hm.</think>Wait.{call}")
    page.find("#send").click()
    wait_end(page)
    assert page.texts(".calls summary") == ["Call of weather"]
    assert page.texts(".calls pre") == ['{\n  "city": "<b>Paris"\n}']
    page.find(".calls summary").click()
    assert not page.find(".calls pre").is_displayed()
    page.find(".thoughts summary").click()
    assert page.texts(".thoughts pre") == ["Hm."]
    open_page(page)
    assert page.find("#prompt").get_attribute("placeholder") == "Result of weather"
    triton.answer = say
    send(page, "warm")
    wait_end(page, 2)
    asked = json.loads(triton.asked[1].inputs["messages"])
    assert asked["tools"] == tools
    _, made, result = asked["messages"]
    assert made["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "<b>Paris"}'}
    assert result == {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": "warm"}
    assert page.find("#prompt").get_attribute("placeholder") == "Message"


@needs_browser
def test_a_call_in_parts(page: Browser) -> None:
    page.run(
        """
        const turn = new Turn({ asked: "x" });
        const call = (index, part) => turn.take({ choices: [{ delta: { tool_calls: [{ index, ...part }] } }] });
        call(0, { id: "a", function: { name: "weather", arguments: "" } });
        call(0, { function: { arguments: '{"ci' } });
        call(1, { id: "b", function: { name: "time", arguments: "{}" } });
        call(0, { function: { arguments: 'ty": 1' } });
        turn.show();
        """
    )
    assert page.texts(".calls summary") == ["Call of weather", "Call of time"]
    assert page.texts(".calls pre") == ['{"city": 1', "{}"]


@needs_browser
def test_the_stop_button_cancels(page: Browser, triton: FakeTriton) -> None:
    was_cancelled = threading.Event()

    def go_on(asked: Asked) -> Answer:
        yield response(
            asked.message,
            text_output="begun",
            finish_reason="None",
            num_input_tokens=("UINT32", "I", [7]),
            num_output_tokens=("UINT32", "I", [1]),
        )
        if triton.ended.wait(30):
            was_cancelled.set()

    triton.answer = go_on
    assert not page.find("#stop").is_displayed()
    send(page)
    page.wait(lambda: page.texts(".text") and "begun" in page.texts(".text")[0], "first text")
    page.find("#stop").click()
    wait_end(page)
    assert was_cancelled.wait(30)
    assert figures(page)["finish"] == "stopped by you"
    assert figures(page)["tokens out"] == "1"
    assert page.find("#send").is_displayed()


@pytest.fixture
def drawing(chromium: Browser) -> Iterator[FakeTriton]:
    """Show the playground of a model of pictures."""
    fake = FakeTriton(models=("painter",))
    with running(fake), gateway_to(fake.port, playground=True) as gateway:
        chromium.driver.get(f"{gateway.url}/playground")
        chromium.wait(lambda: chromium.find("#server").text == "1 model ready", "list of models")
        yield fake
    assert chromium.problems() == []


@needs_browser
def test_a_picture_sharpens_and_is_stopped(chromium: Browser, drawing: FakeTriton) -> None:
    shown = threading.Event()

    def draw(asked: Asked) -> Answer:
        for step in (5, 20):
            yield response(
                asked.message, png=DOT, step=("INT32", "i", [step]), steps=("INT32", "i", [20]),
                finish_reason="stop" if step == 20 else "None",
            )  # fmt: skip
            shown.wait(30)

    drawing.answer = draw
    assert not chromium.find("#schema").is_displayed() and chromium.find("#steps").is_displayed()
    chromium.find("input[value=label]").click()
    chromium.fill("#steps", "20")
    send(chromium, "7")
    chromium.wait(
        lambda: chromium.run("return document.querySelector('.turn img')?.alt") == "step 5 of 20", "preview"
    )
    shown.set()
    wait_end(chromium)
    assert figures(chromium)["finish"] == "step 20 of 20"
    assert chromium.run("return document.querySelector('.turn img').naturalWidth") == 1
    (asked,) = drawing.asked
    assert asked.inputs == {"label": [7]}
    assert parameters(asked) == {"qos_class": "3", "steps": "20", "partial_images": "12", "format": "png_base64"}
    shown.clear()
    drawing.ended.clear()
    send(chromium, "8")
    chromium.wait(lambda: len(chromium.driver.find_elements("css selector", ".turn img")) == 2, "preview")
    chromium.find("#stop").click()
    wait_end(chromium, 2)
    assert drawing.ended.wait(20)
    shown.set()
    assert figures(chromium)["finish"] == "stopped by you"


@needs_browser
def test_a_refused_picture(chromium: Browser, drawing: FakeTriton) -> None:
    drawing.refuse_and_listen("[TW-INPUT] steps is 10000: it must be 1 to 100 (max_steps)")
    send(chromium, "a cat")
    wait_end(chromium)
    assert chromium.texts(".error .message") == ["steps is 10000: it must be 1 to 100 (max_steps)"]
    assert chromium.driver.find_elements("css selector", ".turn img") == []
    assert drawing.asked[0].inputs == {"prompt": "a cat"}


@needs_browser
def test_an_error_shows_its_tag_and_what_to_do(page: Browser, triton: FakeTriton) -> None:
    triton.refuse_and_listen("[TW-BUSY retry_after_ms=250] waiting set is full: <b>9</b> of 9 requests wait")
    send(page)
    wait_end(page)
    assert page.texts(".error .tag") == ["TW-BUSY"]
    assert page.texts(".error .message") == ["waiting set is full: <b>9</b> of 9 requests wait"]
    (remedy,) = page.texts(".error .remedy")
    assert "Send the request again after" in remedy and "Retry after 250 ms." in remedy
    assert figures(page)["finish"] == "error"


@needs_browser
def test_an_error_behind_the_first_text(page: Browser, triton: FakeTriton) -> None:
    def break_off(asked: Asked) -> Answer:
        yield next(iter(say_twice(asked)))
        answer: Any = response(asked.message)
        answer.error_message = "[TW-ENGINE-DEAD retry_after_ms=1000] the engine process ended"
        yield answer

    triton.answer = break_off
    send(page)
    wait_end(page)
    assert page.texts(".text") == ["Hello"]
    assert page.texts(".error .tag") == ["TW-ENGINE-DEAD"]


@needs_browser
def test_a_schema(page: Browser, triton: FakeTriton) -> None:
    for wrong in ("{", "[]", "7"):
        page.fill("#schema", wrong)
        send(page)
        assert page.find("#schema-problem").text.startswith("This is no JSON schema:")
    assert triton.asked == []
    schema = {"type": "object", "properties": {"kind": {"enum": ["a"]}}}
    page.fill("#schema", json.dumps(schema))
    triton.answer = lambda asked: say(asked, text_output='{"kind": "a"}')
    page.find("#send").click()
    wait_end(page)
    assert page.find("#schema-problem").text == ""
    assert page.texts(".text") == ['{"kind": "a"}']
    (asked,) = triton.asked
    assert json.dumps(schema, separators=(",", ":")) in json.dumps(asked.sampling, separators=(",", ":")).replace(
        "\\", ""
    )


@needs_browser
def test_a_key_is_asked_for_and_forgotten(chromium: Browser, triton: FakeTriton, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice"))
    triton.answer = say
    with gateway_to(triton.port, keys=keys, playground=True) as guarded:
        chromium.driver.get(f"{guarded.url}/playground")
        chromium.wait(lambda: "wants an API key" in chromium.find("#server").text, "question for a key")
        send(chromium)
        wait_end(chromium)
        assert chromium.texts(".error .tag") == ["TW-KEY"]
        chromium.fill("#key", "alice\t")
        chromium.wait(lambda: chromium.find("#server").text == "1 model ready", "list of models")
        send(chromium)
        wait_end(chromium, 2)
        assert chromium.texts(".text")[-1] == "ab"
        assert chromium.run("return [document.cookie, localStorage.length, sessionStorage.length]") == ["", 1, 0]
        kept = chromium.run("return localStorage.getItem(localStorage.key(0))")
        assert "alice" not in kept and "one two three" in kept
        chromium.driver.refresh()
        chromium.wait(lambda: "wants an API key" in chromium.find("#server").text, "question for a key")
        assert chromium.find("#key").get_attribute("value") == ""
    assert chromium.problems() == []


@needs_browser
def test_a_gateway_that_is_gone(page: Browser, fake: FakeTriton) -> None:
    with gateway_to(fake.port, playground=True) as brief:
        page.driver.get(f"{brief.url}/playground")
        page.wait(lambda: page.find("#server").text == "1 model ready", "list of models")
    send(page)
    wait_end(page)
    assert "connection was lost" in page.find(".error .message").text
    assert any("ERR_CONNECTION_REFUSED" in problem for problem in page.problems())


@needs_browser
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_no_width_needs_sideways_scrolling(page: Browser, width: int) -> None:
    page.driver.set_window_size(width, 900)
    page.driver.refresh()
    page.wait(lambda: page.find("#server").text == "1 model ready", "list of models")
    send(page, "word " * 30 + "x" * 300)
    wait_end(page)
    assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
    assert page.find("#prompt").is_displayed()
    page.driver.set_window_size(1280, 900)


def test_serve_has_it_with_a_gateway_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "x", "--playground"]) == 2
    assert "--playground goes with --openai-port" in capsys.readouterr().err
