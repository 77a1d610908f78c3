"""Write the generated parts of all pages, or name the stale pages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.docgen import dashboard, pictures
from scripts.docgen.sections import SECTIONS, pages, updated

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/pages", description=__doc__)
    parser.add_argument("marker", nargs="*", choices=[[], *SECTIONS], help="only these parts; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is stale")
    arguments = parser.parse_args()
    stale = False
    wanted = {
        ROOT / page: updated(ROOT, page, (ROOT / page).read_text(), arguments.marker or SECTIONS) for page in pages()
    }
    if not arguments.marker:
        wanted[dashboard.FILE] = dashboard.render()
        wanted |= {path: pictures.render(draw) for path, draw in pictures.PICTURES.items()}
    for path, new in wanted.items():
        page = path.relative_to(ROOT)
        if path.exists() and new == path.read_text():
            continue
        stale = True
        if arguments.check:
            print(f"{page} is stale: run scripts/pages")
        else:
            path.write_text(new)
            print(f"{page} written")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
