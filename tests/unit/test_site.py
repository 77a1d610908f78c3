"""The site that `scripts/docs` builds: good links, nothing from other hosts, no page wider than its window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.support.http_servers import QuietHandler, serving
from tests.support.scripts import made_by

ROOT = Path(__file__).parents[2]
WIDTHS = (1366, 390)
"""Pixels of a small laptop's window and of a phone's."""
MEASURE = """
<pre id="found"></pre>
<script>
  const found = [];
  document.addEventListener("load", ({target: frame}) => {
    if (frame.tagName != "IFRAME") return;
    found.push([frame.name, frame.width, frame.contentDocument.documentElement.scrollWidth]);
    document.getElementById("found").textContent = JSON.stringify(found);
  }, true);
</script>
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mkdocs checks links, anchors and the navigation: every warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [ROOT / "scripts/docs", "--site-dir", folder], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def chromium() -> Path:
    return made_by("chromium") / "chromium"


class FilesHandler(QuietHandler, SimpleHTTPRequestHandler):
    pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of ``tmp_path`` on this machine."""
    with serving(partial(FilesHandler, directory=tmp_path)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def too_wide(folder: Path, pages: list[str], url: str, chromium: Path) -> list[str]:
    """The pages below ``folder`` that are wider than a window. Each is in a frame of each width, of one document.

    They run no scripts: each page would build its index for the search.
    """
    frames = [
        f'<iframe name="{page}" src="{page}" width="{width}" sandbox="allow-same-origin"></iframe>'
        for width in WIDTHS
        for page in pages
    ]
    (folder / "widths.html").write_text("\n".join([MEASURE, *frames]))
    browser = [chromium, "--dump-dom", f"{url}/widths.html"]
    done = subprocess.run(browser, capture_output=True, text=True, timeout=100, check=True)
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    found = json.loads(text)
    assert sorted((page, width) for page, width, _ in found) == sorted((p, str(w)) for w in WIDTHS for p in pages)
    return sorted(f"{page} at {width}: {wide}" for page, width, wide in found if wide > int(width))


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    found = {found for page in site.rglob("*.html") for found in loads.findall(page.read_text())}
    assert found == set()
    assert loads.findall('<link rel="stylesheet" href="https://fonts.googleapis.com/css?family=Roboto">') != []
    assert "url(http" not in "".join(sheet.read_text() for sheet in site.rglob("*.css"))


def test_no_page_is_wider_than_its_window(site: Path, served: str, tmp_path: Path, chromium: Path) -> None:
    shutil.copytree(site, tmp_path, dirs_exist_ok=True)
    pages = [str(page.relative_to(site)) for page in sorted(site.rglob("*.html")) if page.name != "404.html"]
    assert len(pages) > 20
    assert too_wide(tmp_path, pages, served, chromium) == []


def test_a_page_that_is_too_wide_is_found(served: str, tmp_path: Path, chromium: Path) -> None:
    (tmp_path / "a.html").write_text('<div style="width: 500px">a</div>')
    assert too_wide(tmp_path, ["a.html"], served, chromium) == ["a.html at 390: 508"]
