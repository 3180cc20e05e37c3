"""The page of devices agrees with the rules of the platforms."""

import pytest
import refusals_table
from readme import ROOT


@pytest.mark.parametrize("name", refusals_table.TABLES)
def test_the_page_has_the_platforms_rules(name):
    page = (ROOT / "docs" / "devices.md").read_text()
    on_the_page = page.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    rows = refusals_table.TABLES[name]()
    assert on_the_page.splitlines() == rows, "python tests/platform/refusals_table.py prints it anew"
