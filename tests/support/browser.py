"""A browser for tests of the page: headless Chromium, driven by selenium. Tests skip where there is none."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.patience import PATIENCE


class Browser:
    """One window. Elements are named by their ids."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, keep: bool = False) -> None:
        """A page as for the first time, in a window of 1280 x 900. `keep`: with what it keeps in the browser."""
        self.driver.get("about:blank")
        if not keep:
            storage = {"origin": url.rstrip("/"), "storageTypes": "all"}
            self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", storage)
        self.resize(1280, 900)
        self.driver.get(url)
        self.forget()

    def resize(self, width: int, height: int, *, phone: bool = False, scheme: str = "light") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def script(self, source: str, *arguments: Any) -> Any:
        return self.driver.execute_script(source, *arguments)

    def wait_for(self, source: str, *arguments: Any) -> Any:
        """What an asynchronous function's body returns."""
        wrapped = (
            "const done = arguments[arguments.length - 1];"
            f"(async function () {{ {source} }}).apply(null, arguments).then(done, (error) => done(String(error)));"
        )
        return self.driver.execute_async_script(wrapped, *arguments)

    def text(self, selector: str) -> str:
        """The text of the first element that fits, '' if none does."""
        return self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def seen(self) -> str:
        """The text that a reader sees."""
        return self.script("return document.body.innerText")

    def click(self, name: str) -> None:
        self._act(lambda: self.driver.find_element("id", name).click())

    def type(self, name: str, text: str) -> None:
        self._act(lambda: self.driver.find_element("id", name).send_keys(text))

    def _act(self, action: Callable[[], None]) -> None:
        """Find an element and use it; again, if the page replaced it in between, as a person does."""
        from selenium.common.exceptions import StaleElementReferenceException

        def is_done() -> bool:
            try:
                action()
            except StaleElementReferenceException:
                return False
            return True

        self.until(is_done)

    def put_files(self, name: str, *paths: str) -> None:
        """Chooses files for an input, as its dialogue would."""
        self.script("document.getElementById(arguments[0]).hidden = false", name)
        self.driver.find_element("id", name).send_keys("\n".join(paths))
        self.script("document.getElementById(arguments[0]).hidden = true", name)

    def press_button(self, selector: str, number: int = 0) -> None:
        """Clicks the element of this number that fits."""
        self._act(lambda: self.driver.find_elements("css selector", selector)[number].click())

    def count(self, selector: str) -> int:
        return self.script("return document.querySelectorAll(arguments[0]).length", selector)

    def press(self, *keys: str) -> None:
        """To what has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        """The id of what has the focus, or what else tells it."""
        return self.script("const it = document.activeElement; return it.id || it.textContent.trim() || it.tagName")

    def until(self, condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
        """Waits until `condition()` holds, and returns what it gave."""
        end = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < end, f"what was waited for did not happen; the page shows:\n{self.seen()}"
            time.sleep(0.05)
        return found

    def forget(self) -> None:
        """Only what happens from now on is in `errors`."""
        self.driver.get_log("browser")

    def errors(self) -> list[str]:
        """What the console said."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """The URLs that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser, once the tests that need it run."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("the page's tests need chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Without its sandbox, as it has none in containers; it loads only what the tests serve.
    for switch in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "disable-quic"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
    ):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driven = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        driven.set_script_timeout(PATIENCE)
        yield Browser(driven)
    finally:
        driven.quit()
