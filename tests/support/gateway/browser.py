"""A headless Chromium, driven by selenium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.triton.serving import wait_for

MISSING = "no chromium and chromedriver on PATH: apt-get install chromium chromium-driver"
HAS_BROWSER = bool(shutil.which("chromium") and shutil.which("chromedriver"))
LIMIT_S = 60.0
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [one.text for one in self.driver.find_elements("css selector", selector)]

    def wait(self, holds: Callable[[], object], what: str) -> None:
        wait_for(holds, LIMIT_S, what)

    def fill(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def problems(self) -> list[str]:
        """Return what the console has shown since the last look, answers with an error status left out."""
        entries = self.driver.get_log("browser")
        return [one["message"] for one in entries if "the server responded with a status of" not in one["message"]]


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """`profile` is a folder without any."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in (*_FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
