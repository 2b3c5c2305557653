"""The explorer in the browser of the system: where it is, and a page in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

__all__ = ["Visit", "browser", "wait_until_drawn"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Visit:
    """An open page, and everything that it should not do: messages on its console, errors and requests."""

    def __init__(self, context: BrowserContext, path: Path) -> None:
        self.address = path.resolve().as_uri()
        self.complaints: list[str] = []
        self.page: Page = context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def open(self, fragment: str = "") -> Page:
        """Open the page anew, with a state in its address."""
        self.page.goto("about:blank")
        self.page.goto(self.address + (f"#{fragment}" if fragment else ""))
        wait_until_drawn(self.page)
        return self.page

    def _note(self, url: str) -> None:
        if url.split("#")[0] not in (self.address, "about:blank"):
            self.complaints.append(f"request: {url[:200]}")


def wait_until_drawn(page: Page) -> None:
    """Wait until the page has drawn its state and written it into its address."""
    # The mark is removed by a change itself, and set when the change is drawn and written.
    page.locator("html[data-ready]").wait_for()


@contextmanager
def browser() -> Iterator[Browser]:
    """The browser of the system. Playwright downloads none."""
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        raise RuntimeError(
            f"the tests of the explorer need a browser, and none of {', '.join(_NAMES)} is installed: on Debian,"
            " apt-get install chromium; `make test` leaves these tests out"
        )
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()
