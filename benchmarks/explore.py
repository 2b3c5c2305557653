"""Times of the explorer in the browser of the system: from the command to a ready page, and from a slider to a picture.

python benchmarks/explore.py [--json benchmarks/explore.json]; needs ropewalk[dev] and chromium.

The time of a slider is from its input event to the end of the next frame, with the visible panel drawn: the median of
50 steps of the base, with 128 pairs and 2048 points. All panels are measured, one after the other.
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

from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import processor

STEPS = 50
# 128 pairs, and a context with more distances than the 2048 points of a curve.
STATE = (
    "rule=Yarn&base=10000&factor=4&trained_length=32768&head_dim=256&rotary_dim=256&context=131072&position=1000"
    "&distance=1000"
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


def missed(cases: list[dict[str, Any]]) -> list[str]:
    """The limits that a page exceeds: a file of 6 MB, 3 seconds to a ready page, 100 ms from a slider to a picture."""
    limits = {"MB": 6.0, "s": 3.0, "ms": 100.0}
    measured = {case["what"] for case in cases}
    missing = [f"{what}: not measured" for what in ("command to page", "file", *PANELS) if what not in measured]
    return missing + [
        f"{case['what']}: {case['value']} {case['unit']}" for case in cases if case["value"] > limits[case["unit"]]
    ]


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
        cases: list[dict[str, Any]] = [
            {"what": "command to page", "unit": "s", "value": round(statistics.median(starts), 2)}
        ]
        cases.append({"what": "file", "unit": "MB", "value": round(path.stat().st_size / 1e6, 2)})
        cases += [
            {"what": panel, "unit": "ms", "value": round(measure_slider(browser, path, panel), 1)} for panel in PANELS
        ]
        record = {
            "command": "python benchmarks/explore.py",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hardware": {
                "processor": processor(),
                "threads": os.cpu_count(),
                "load": round(os.getloadavg()[0], 1),
                "nice": os.nice(0),
            },
            "versions": {"chromium": browser.version, "python": platform.python_version()},
            "cases": cases,
        }
        browser.close()
    for case in cases:
        print(f"{case['what']:16}{case['value']:8} {case['unit']}")
    if arguments.json:
        write_record(record, arguments.json, missed(cases))
    sys.exit("\n".join(missed(cases)) or 0)


if __name__ == "__main__":
    main()
