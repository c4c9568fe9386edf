"""The playground of the running server: an answer of the demo model, and one that is stopped."""

from __future__ import annotations

import pytest

from support.gateway.browser import HAS_BROWSER, MISSING, browser
from support.triton.serving import Server, wait_for
from tidewheel.top.watch import list_here
from tidewheel_client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not HAS_BROWSER, reason=MISSING)]

QUESTION = "What is a tuple?"
# A driver's click may come after the end of the answer.
STOP_AT_FIRST_TEXT = """
new MutationObserver((_, observer) => {
  const texts = document.querySelectorAll(".text");
  if (texts.length === 2 && texts[1].textContent.replace("▍", "").trim()) {
    observer.disconnect();
    document.querySelector("#stop").click();
  }
}).observe(document.body, {subtree: true, childList: true, characterData: true});
"""


def test_an_answer_and_one_that_is_stopped(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    metrics_url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.driver.get(f"{server.openai}/playground")
        page.wait(lambda: page.find("#server").text == "1 model ready", "list of models")
        page.fill("#max-tokens", "30")
        page.fill("#temperature", "0")
        page.fill("#prompt", f"{QUESTION}\n")
        page.wait(lambda: page.texts(".turn .figures dd"), "end of the answer")
        with Client(server.grpc, model="demo", timeout_s=60) as client:
            expected = client.generate(messages=[{"role": "user", "content": QUESTION}], max_tokens=30, temperature=0)
        assert page.run("return turns[0].said.text") == expected.text
        assert page.texts(".text")[0].split()[0] == expected.text.split()[0]
        assert str(expected.num_output_tokens) in page.texts(".turn .figures dd")
        page.find("input[value=prompt]").click()
        page.fill("#max-tokens", "1000")
        page.driver.execute_script(STOP_AT_FIRST_TEXT)
        page.fill("#prompt", "Tell me all of it\n")
        page.wait(lambda: "stopped by you" in page.texts(".turn:last-child .figures")[0], "end of a turn")
        wait_for(lambda: list_here(metrics_url, "").num_sequences == 0, 60, "end of the request")
        assert page.problems() == []
