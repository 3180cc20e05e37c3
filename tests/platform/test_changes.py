"""The plugin changes what the registry of bridges declares, and docs/changes-to-vllm.md says it."""

import runpy
from pathlib import Path

import pytest
from changes import declared, found

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.window
def test_the_declared_changes_are_all():
    """One test for all platforms, because their processes share the import of vLLM."""
    platforms = "cpu", "cuda", "native"
    assert found(*platforms) == {platform: declared(platform) for platform in platforms}


def test_the_page_is_what_the_registry_says():
    page = runpy.run_path(str(REPOSITORY / "tools" / "changes.py"))["page"]
    assert (REPOSITORY / "docs" / "changes-to-vllm.md").read_text() == page(), "run: make changes"
