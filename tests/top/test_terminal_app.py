"""Keys of the live view, without a terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.top.watched import PagesOf, recorded, request_line, watch_of
from tidewheel.top import terminal_app
from tidewheel.top.server_view import RequestLine
from tidewheel.top.terminal_app import QuestionScreen, TerminalApp
from tidewheel.top.view_text import ORDERS

pytest.importorskip("textual", reason="pip install 'tidewheel[top]'")

REQUESTS = [
    request_line(1, tokens_rate=1.0),
    request_line(2, tokens_rate=3.0, request_id="[red]id[/red]"),
    request_line(3, tokens_rate=2.0),
]


def with_app(
    check: Callable[[TerminalApp, Any], Awaitable[None]], size: tuple[int, int] = (130, 50), interval_s: float = 60.0
) -> None:
    async def main() -> None:
        watch = watch_of(PagesOf(recorded()), REQUESTS)
        app = TerminalApp(watch, interval_s, watch.look())
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await check(app, pilot)

    asyncio.run(main())


def numbers(app: TerminalApp) -> list[int]:
    return [int(str(key.value).rpartition("/")[2]) for key in app._requests.rows]


def test_orders_and_the_chosen_request() -> None:
    async def check(app: TerminalApp, pilot: Any) -> None:
        assert numbers(app) == [3, 2, 1]
        await pilot.press("down")
        assert app._chosen_key().endswith("/2")
        await pilot.press("s")
        assert app._requests.border_title == f"requests: 3 unfinished, {list(ORDERS)[1]}"
        assert numbers(app) == [1, 3, 2]
        assert app._chosen_key().endswith("/2")  # it stays chosen

    with_app(check)


@pytest.mark.parametrize(("key", "cancelled"), [("y", [3]), ("n", []), ("escape", []), ("k", [])])
def test_a_request_is_cancelled_after_a_question(
    monkeypatch: pytest.MonkeyPatch, key: str, cancelled: list[int]
) -> None:
    asked: list[int] = []

    def cancel(request: RequestLine) -> str:
        asked.append(request.number)
        return f"request {request.request_id} was cancelled"

    monkeypatch.setattr(terminal_app, "cancel", cancel)

    async def check(app: TerminalApp, pilot: Any) -> None:
        await pilot.press("k")
        assert isinstance(app.screen, QuestionScreen)
        assert "Cancel request id-3 of tenant acme" in app.screen.text
        await pilot.press(key)
        await app.workers.wait_for_complete()
        assert not isinstance(app.screen, QuestionScreen)
        assert asked == cancelled
        assert [note.message for note in app._notifications] == [f"request id-{n} was cancelled" for n in cancelled]

    with_app(check)


def test_q_ends_it() -> None:
    async def check(app: TerminalApp, pilot: Any) -> None:
        await pilot.press("q")
        assert not app.is_running

    with_app(check)


def test_a_server_that_answers_no_more_keeps_what_was_seen() -> None:
    async def check(app: TerminalApp, pilot: Any) -> None:
        app._watch.server.texts = ["# of another program\n"]  # type: ignore[attr-defined]
        app._look()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "NO ANSWER: http://127.0.0.1:8002/metrics has no figures" in app.query_one("#verdict").render().plain  # type: ignore[attr-defined]
        assert numbers(app) == [3, 2, 1]

    with_app(check)


def test_names_of_clients_are_no_markup() -> None:
    async def check(app: TerminalApp, pilot: Any) -> None:
        row = app._requests.get_row_at(1)
        assert row[-1].plain == "[red]id[/red]"

    with_app(check)


@pytest.mark.parametrize("size", [(130, 50), (80, 24), (80, 50), (200, 60)])
def test_figures_and_requests_are_both_shown(size: tuple[int, int]) -> None:
    async def check(app: TerminalApp, pilot: Any) -> None:
        await pilot.pause()
        assert app.query_one("#figures").size.height > 0
        assert app._requests.size.height > 0

    with_app(check, size)
