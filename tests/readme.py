"""The code blocks of the README and of the page on CPUs. The tests run these blocks and not a copy of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "cpu.md")


def block(language: str, beginning: str) -> str:
    """The one fenced block in this language that begins with these words."""
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = [text for name, text in blocks if name == language and text.startswith(beginning)]
    assert len(found) == 1, f"the pages have {len(found)} blocks in {language!r} that begin with {beginning!r}"
    return found[0]
