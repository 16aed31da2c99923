"""The pages of the documentation and the fenced blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]


def name_of(page: Path) -> str:
    """For the ids of tests: ``tutorial/both.md``."""
    return str(page.relative_to(DOCS) if page.is_relative_to(DOCS) else page.name)


class Block(NamedTuple):
    """A fenced block: where its first line stands, its info string, its text, what it prints."""

    line: int
    info: list[str]
    text: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    n, text_since = 0, True
    while n < len(lines):
        fence = re.match(r"(`{3,})(\S.*)$", lines[n])
        if not fence:
            text_since = text_since or bool(lines[n].strip())
            n += 1
            continue
        end = next(k for k in range(n + 1, len(lines)) if lines[k].startswith(fence[1]))
        info, body = fence[2].split(), "\n".join(lines[n + 1 : end])
        if info[0] == "text" and found and not text_since and found[-1].info[0] == "python":
            found[-1] = found[-1]._replace(output=body)
        else:
            found.append(Block(n + 2, info, body, None))
        n, text_since = end + 1, False
    return found


def shell_blocks(page: Path) -> list[Block]:
    return [b for b in blocks_of(page) if b.info[0] in ("sh", "bash")]
