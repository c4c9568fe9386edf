"""Take the pictures of `tidewheel top` and of the playground, from runs of the demo model.

    PYTHONPATH=tests:benchmarks python -m support.top.screen_pictures docs/pictures

It needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from pathlib import Path

from PIL import Image, ImageOps

from support.deploy.picture_runs import HIGH_RATE, SERVER, SLOW_STEP_S, STEP_S, USUAL_RATE, offer
from support.deploy.planted_load import KEY, serving_with_gateway
from support.faults.slowed import SECONDS_FILE, slow_down
from support.gateway.browser import Browser, browser
from support.triton.serving import REPOSITORY, Server, start_server, stop_server, wait_ready
from tidewheel.top.terminal_app import TerminalApp
from tidewheel.top.watch import ServerWatch
from tidewheel_client.server_pages import ServerPages

SECONDS = 20.0  # of load before the picture
COLUMNS, ROWS = 118, 46
WIDTH = 1080  # pixels
CELL_SCALE = 9 / 12.2  # whole pixels for a cell of the screen: equal letters have equal pixels
NUM_COLOURS = 64


def take_top(name: str, rate: float, step_s: float, out: Path, *, shown: float = 1.0) -> None:
    with tempfile.TemporaryDirectory() as folder:
        seconds = Path(folder) / "seconds"
        slow_down(seconds, step_s)
        variables = {"TIDEWHEEL_FAULTS": "support.faults.slowed", SECONDS_FILE: str(seconds)}
        with serving_with_gateway(Path(folder), SERVER, variables) as server:
            svg = asyncio.run(_screen_under_load(server, rate))
        page = Path(folder) / "screen.svg"
        width = CELL_SCALE * float(svg.split('viewBox="0 0 ', 1)[1].split()[0])
        page.write_text(svg.replace("<svg ", f'<svg width="{width}" ', 1))
        with browser(Path(folder) / "profile", 1460, 1400) as one:
            one.driver.get(page.as_uri())
            picture = _without_margin(one.find("svg").screenshot_as_png)
            _save(picture.crop((0, 0, picture.width, round(shown * picture.height))), out / name)


async def _screen_under_load(server: Server, rate: float) -> str:
    pages = ServerPages(
        server.grpc, f"http://127.0.0.1:{server.metrics_port}/metrics", f"http://127.0.0.1:{server.health_port}/ready"
    )
    watch = ServerWatch(pages, gateway_url=f"{server.openai}/metrics", api_key=KEY)
    load = asyncio.create_task(offer(server.grpc, lambda _: rate, 2 * SECONDS))
    app = TerminalApp(watch, 1.0, await asyncio.to_thread(watch.look))
    async with app.run_test(size=(COLUMNS, ROWS)) as pilot:
        await pilot.pause(SECONDS)
        svg = app.export_screenshot(title="tidewheel top")
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return svg


def take_playground(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--model-repository", str(REPOSITORY), "--models", "demo")
        server = wait_ready(start_server(*arguments, log=Path(folder) / "log", with_gateway=True))
        try:
            with browser(Path(folder) / "profile", WIDTH, 864) as page:
                page.driver.get(f"{server.openai}/playground")
                page.wait(lambda: page.find("#server").text == "1 model ready", "list of models")
                page.fill("#max-tokens", "60")
                _ask(page, "What is a tuple?", 1)
                page.fill("#temperature", "200")
                _ask(page, "And a list?", 2)
                _save(_read(page.driver.get_screenshot_as_png()), out / "playground.webp")
        finally:
            stop_server(server)


def _ask(page: Browser, text: str, number: int) -> None:
    page.fill("#prompt", f"{text}\n")
    page.wait(lambda: sum(map(bool, page.texts(".turn .figures"))) == number, "end of an answer")


def _read(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def _without_margin(png: bytes) -> Image.Image:
    picture = _read(png)
    return picture.crop(ImageOps.invert(picture).getbbox())


def _save(picture: Image.Image, path: Path) -> None:
    picture.thumbnail((WIDTH, 2 * WIDTH), Image.Resampling.LANCZOS)
    picture.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, lossless=True, quality=100, method=6
    )
    print(path, path.stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the pictures")
    out = parser.parse_args().out
    take_top("top.webp", HIGH_RATE, STEP_S, out)
    take_top("top_slow_model.webp", USUAL_RATE, SLOW_STEP_S, out, shown=0.445)
    take_playground(out)


if __name__ == "__main__":
    main()
