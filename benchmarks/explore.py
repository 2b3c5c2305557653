"""Times of the explorer in the browser of the system: from the command to a ready page, and from a slider to a picture.

python benchmarks/explore.py [--json benchmarks/explore.json]; needs ropewalk[dev] and chromium.

The time of a slider is from its input event to the end of the next frame, with the visible panel drawn: the median of
50 steps of the base, with two specs of 128 pairs and 2048 points. All panels are measured, one after the other.
"""

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from ropewalk.tools.output import processor, write_json

STEPS = 50
# 128 pairs, and a context with more distances than the 2048 points of a curve.
STATE = (
    "rule=Yarn&base=10000&factor=4&trained_length=32768&head_dim=256&rotary_dim=256&context=131072&position=1000"
    "&distance=1000&b.rule=Plain&b.head_dim=256&b.rotary_dim=256"
)
PANELS = ("rotation", "wavelength", "rule", "decay", "score", "bias", "compare", "precision")
# In the event handler's frame: the frame is drawn when the message arrives that it sends.
MEASURE = """() => {
  window.times = [];
  document.getElementById('base-slider').addEventListener('input', (event) => {
    requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = () => window.times.push(performance.now() - event.timeStamp);
      channel.port2.postMessage(null);
    });
  });
}"""


def open_ready(browser: Browser, path: Path, state: str = "") -> Any:
    """A page that has drawn its state."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(path.as_uri() + (f"#{state}" if state else ""))
    page.locator("html[data-ready]").wait_for()
    return page


def measure_start(browser: Browser, path: Path) -> float:
    """Seconds from the start of the command to a page that has drawn its first picture, in a browser that runs."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "ropewalk", "explore", "--no-open", "--out", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    page = open_ready(browser, path)
    seconds = time.perf_counter() - start
    page.close()
    return seconds


def measure_slider(browser: Browser, path: Path, panel: str) -> float:
    """The median of the times from an input event to the end of the next frame, in milliseconds."""
    page = open_ready(browser, path, f"panel={panel}&{STATE}")
    page.evaluate(MEASURE)
    page.focus("#base-slider")
    for step in range(STEPS):
        page.keyboard.press("ArrowRight" if step % 20 < 10 else "ArrowLeft")
        while page.evaluate("window.times.length") <= step:
            pass
    times = page.evaluate("window.times")
    page.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the explorer in a browser.")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        path = Path(folder, "page.html")
        starts = [measure_start(browser, path) for _ in range(5)]
        sliders = {panel: round(measure_slider(browser, path, panel), 1) for panel in PANELS}
        record = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hardware": f"{os.cpu_count()} × {processor()}",
            "browser": f"Chromium {browser.version}",
            "python": platform.python_version(),
            "command": "python benchmarks/explore.py",
            "load": round(os.getloadavg()[0], 1),
            "file_bytes": path.stat().st_size,
            "command_to_page_seconds": round(statistics.median(starts), 2),
            "slider_to_picture_ms": sliders,
        }
        browser.close()
    for key, value in record.items():
        print(f"{key}: {value}")
    if arguments.json:
        write_json(record, arguments.json)


if __name__ == "__main__":
    main()
