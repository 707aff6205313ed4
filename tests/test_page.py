"""The HTML page stands alone, and a real browser shows its tables and pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sweep.page import Figure, Section, page
from sweep.report import main
from sweep.tables import Table
from tests.made_up import make_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROME = os.environ.get("CHROME") or next(filter(None, map(shutil.which, NAMES)), None)

# Waits for the pictures, and leaves what a reader sees as JSON in the document, which --dump-dom prints.
PROBE = """<script>addEventListener("load", () => {
  const found = {
    tables: [...document.querySelectorAll("table")].map(table => table.tBodies[0].rows.length),
    heights: [...document.querySelectorAll("tbody tr")].map(row => row.getBoundingClientRect().height),
    images: [...document.images].map(image => [image.naturalWidth, image.getBoundingClientRect().width, image.alt]),
    fetched: performance.getEntriesByType("resource").map(entry => entry.name.slice(0, 10)),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
  const place = document.createElement("pre");
  place.id = "found";
  place.textContent = JSON.stringify(found);
  document.body.append(place);
});</script></body>"""


def browse(file: Path, *, width: int = 1200) -> dict[str, Any]:
    """What a browser finds in a copy of the page in `file`, in a window of so many pixels."""
    assert CHROME is not None
    copy = file.with_name("probed.html")
    copy.write_text(file.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=10000"]
    options += [f"--user-data-dir={file.parent / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    command = [CHROME, *options, copy.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    return json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for method in ("adamw", "tsr"):
        for seed in (0, 1):
            make_run(folder / "runs" / f"{method}{seed}", method, seed=seed, loss=4 + seed / 10)
    (make_run(folder / "runs" / "killed", "galore") / "summary.json").unlink()
    assert main([str(folder / "runs"), "--out", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


@pytest.mark.skipif(CHROME is None, reason="needs Chromium, in PATH or named by CHROME: apt-get install chromium")
@pytest.mark.parametrize("width", [1200, 500])
def test_a_browser_shows_tables_and_pictures(report: Path, width: int) -> None:
    found = browse(report, width=width)
    assert found["tables"] == [2, 1]  # two methods, and the run that is not done
    assert min(found["heights"]) > 5
    pictures = len(list(report.parent.glob("*.png")))
    assert len(found["images"]) == pictures >= 1
    for natural, shown, alternative in found["images"]:
        assert natural > 500 and 200 < shown <= width and alternative
    assert set(found["fetched"]) <= {"data:image"}
    assert found["overflow"] <= 0  # wide tables scroll in their own box


@pytest.mark.skipif(CHROME is None, reason="needs Chromium, in PATH or named by CHROME: apt-get install chromium")
def test_the_browser_finds_a_broken_picture(report: Path, tmp_path: Path) -> None:
    text = report.read_text(encoding="utf-8")
    (tmp_path / "broken.html").write_text(text.replace("base64,iVBOR", "base64,AAAAA", 1), encoding="utf-8")
    widths = [natural for natural, _, _ in browse(tmp_path / "broken.html")["images"]]
    assert widths[0] == 0 and all(widths[1:])


def test_the_page_needs_nothing_else(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and text.count("<html") == text.count("</html>") == 1
    assert set(re.findall(r'(?:src|href|srcset)="([^"]{0,10})', text)) == {"data:image"}
    for reference in ("http:", "https:", "url(", "@import", "<link", "<script", str(report.parent)):
        assert reference not in text, reference


def test_text_is_escaped_and_order_kept(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG rest")
    table = Table("Of <i>", ("a",), (("1",),))
    figure = Figure(picture, 'Loss < 3, "best" of `adamw`.')
    text = page("A & B", [Section("One", (table,), (figure,)), Section("Two")])
    assert "<title>A &amp; B</title>" in text
    assert 'alt="Loss &lt; 3, &quot;best&quot; of adamw."' in text and "<code>adamw</code>.</figcaption>" in text
    places = [text.index(part) for part in ("<h2>One", "<table", "<figure", "<h2>Two")]
    assert places == sorted(places)


@pytest.mark.parametrize("content", [None, b"", b"%PDF-1.4"])
def test_a_figure_that_is_no_picture_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "a.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.png' is (missing|no PNG)"):
        page("", [Section("", figures=(Figure(file, "x"),))])
