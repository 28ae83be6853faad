"""Takes the screenshots of the example report: `python docs/screenshots.py`; needs Chromium.

Each is of docs/default/report.html, by day and by night: its top on a desk, a model on a phone.
"""

import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
SIZES = {"desktop": (1280, 2250, 1.0, ""), "phone": (390, 1900, 1.5, "#model-0")}


def main() -> None:
    """Writes docs/report-<size>-<scheme>.png."""
    # as root, as in a container, Chromium runs only without its sandbox
    arguments = ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        for size, (width, height, scale, place) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(
                    viewport={"width": width, "height": height},
                    device_scale_factor=scale,
                    color_scheme=scheme,
                    is_mobile=size == "phone",
                    has_touch=size == "phone",
                    reduced_motion="reduce",
                )
                page.goto((HERE / "default" / "report.html").as_uri() + place)
                page.screenshot(path=HERE / f"report-{size}-{scheme}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
