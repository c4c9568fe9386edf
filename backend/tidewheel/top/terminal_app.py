from collections import deque
from typing import ClassVar

from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from tidewheel.bench.tables import TextTable
from tidewheel.top import TopError, view_text
from tidewheel.top.server_view import RequestLine, ServerView
from tidewheel.top.view_text import REQUEST_COLUMNS, request_cells
from tidewheel.top.watch import ServerWatch, cancel
from tidewheel_client.errors import RequestError

_GOOD, _TOLERABLE = ("SERVING", "IDLE"), ("QUEUEING", "SLOW")


class TerminalApp(App[None]):
    """Live view in a terminal, renewed by a thread every `interval_s`."""

    CSS_PATH = "terminal_app.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (150, "-huge")]  # noqa: RUF012 - textual's type
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("s", "sort", "sort"),
        Binding("k", "cancel", "cancel a request"),
    ]

    def __init__(self, watch: ServerWatch, interval_s: float, first: ServerView) -> None:
        super().__init__()
        self._watch = watch
        self._interval_s = interval_s
        self._view = first
        self._problem = ""
        self._orders = deque(view_text.ORDERS)  # the first is shown
        self._lines: dict[str, RequestLine] = {}  # by key of the row

    def compose(self) -> ComposeResult:
        yield Static(id="headline")
        yield Static(id="verdict")
        with VerticalScroll(id="figures", can_focus=False):
            with Container(id="panels"):
                yield from (Static(classes="panel") for _ in view_text.panels(self._view))
            with Container(id="tables"):
                yield from (Static(classes="panel") for _ in view_text.tables(self._view))
        yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        requests = self._requests
        requests.add_columns(*(column for column, _ in REQUEST_COLUMNS))
        requests.focus()
        self._draw()
        self.set_interval(self._interval_s, self._look)

    def action_sort(self) -> None:
        self._orders.rotate(-1)
        self._draw()

    @work(exclusive=True, group="question")
    async def action_cancel(self) -> None:
        chosen = self._lines.get(self._chosen_key())
        if chosen is None:
            self.notify("no request is chosen")
            return
        cells = request_cells(chosen)
        question = f"Cancel request {cells[-1]} of tenant {cells[-2]}, {cells[2]} old?\nIts client is told so."
        if await self.push_screen_wait(QuestionScreen(question)):
            self._cancel(chosen)

    @work(thread=True, exclusive=True, group="look")
    def _look(self) -> None:
        try:
            view, problem = self._watch.look(), ""
        except (TopError, RequestError) as error:
            view, problem = self._view, str(error)
        self.call_from_thread(self._take, view, problem)

    @work(thread=True, group="cancel")
    def _cancel(self, request: RequestLine) -> None:
        self.call_from_thread(self.notify, cancel(request), markup=False)

    def _take(self, view: ServerView, problem: str) -> None:
        self._view, self._problem = view, problem
        self._draw()

    @property
    def _requests(self) -> DataTable[Text]:
        return self.query_one("#requests", DataTable)

    def _draw(self) -> None:
        view = self._view
        self.query_one("#headline", Static).update(Text(view_text.headline(view)))
        verdict = self.query_one("#verdict", Static)
        shown = f"NO ANSWER: {self._problem}" if self._problem else view.summary
        verdict.update(Text(shown))
        word = shown.partition(":")[0]
        verdict.set_class(word in _GOOD, "good")
        verdict.set_class(word in _TOLERABLE, "tolerable")
        sections = view_text.panels(view) | view_text.tables(view)
        for panel, (title, table) in zip(self.query(".panel").results(Static), sections.items(), strict=True):
            panel.border_title = escape(title)
            panel.update(_rich(table))
            panel.display = bool(table.rows)
        self._draw_requests()

    def _draw_requests(self) -> None:
        table, order = self._requests, self._orders[0]
        chosen = self._chosen_key()
        rows = view_text.ordered(self._view, order)
        self._lines = {f"{one.engine}/{one.engine_pid}/{one.number}": one for one in rows}
        table.border_title = escape(view_text.requests_title(self._view, order))
        table.clear()
        for key, one in self._lines.items():
            table.add_row(*_cells(one), key=key)
        if chosen in self._lines:
            table.move_cursor(row=table.get_row_index(chosen), animate=False)

    def _chosen_key(self) -> str:
        table = self._requests
        if not table.row_count:
            return ""
        return str(table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value)


class QuestionScreen(ModalScreen[bool]):
    """Question over the view, ended by any key; `y` answers yes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        with Container(id="question"):
            yield Static(Text(self.text))
            yield Static(Text("y: cancel it    any other key: leave it", style="bold"))

    def on_key(self, event: Key) -> None:
        event.stop()
        self.dismiss(event.key == "y")


def _cells(request: RequestLine) -> list[Text]:
    cells = request_cells(request)
    first, last = 2, len(REQUEST_COLUMNS) - view_text.NUM_TEXTS
    return [Text(cell, justify="right" if first <= index < last else "left") for index, cell in enumerate(cells)]


def _rich(table: TextTable) -> RichTable:
    has_header = any(table.header)
    shown = RichTable(box=None, show_header=has_header, pad_edge=False, header_style="dim", expand=False)
    for index, name in enumerate(table.header):
        is_label = index < table.num_labels
        style = "dim" if is_label and not has_header else ""
        shown.add_column(Text(name), style=style, justify="right" if has_header and not is_label else "left")
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown
