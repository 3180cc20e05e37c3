"""The README's code blocks. The tests run these blocks and not a copy of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def block(language: str, beginning: str) -> str:
    """The one fenced block in this language that begins with these words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    found = [text for name, text in blocks if name == language and text.startswith(beginning)]
    assert len(found) == 1, f"the README has {len(found)} blocks in {language!r} that begin with {beginning!r}"
    return found[0]
