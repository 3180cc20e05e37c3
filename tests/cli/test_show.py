"""Tables on terminals of some width, in pipes, and with cells that rich could take for its markup."""

import pytest

from vllm_opset.cli.show import print_table

LONG = "first kernel for cpu that supports it, and a reason that is wider than a narrow terminal"


def printed(capsys, *rows: dict) -> str:
    print_table("A table of [two] columns", ("op", "why"), rows)
    return capsys.readouterr().out


@pytest.fixture
def in_a_pipe(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.usefixtures("in_a_pipe")
@pytest.mark.parametrize("text", ["[/INST] yes", "weight must be [5]", "[red]", "git :fire: x"])
def test_a_cell_is_text(capsys, text):
    assert text in printed(capsys, {"op": "linear", "why": text})


@pytest.mark.usefixtures("in_a_pipe")
def test_a_title_is_text(capsys):
    assert "A table of [two] columns" in printed(capsys, {"op": "linear", "why": LONG})


@pytest.mark.usefixtures("in_a_pipe")
def test_each_row_is_one_line_in_a_pipe(capsys):
    lines = printed(capsys, {"op": "silu_and_mul_with_clamp", "why": LONG * 5}).splitlines()
    assert any("silu_and_mul_with_clamp" in line and LONG * 5 in line for line in lines)
    assert all(line == line.rstrip() for line in lines[1:])


def test_no_columns_are_an_unset_variable(capsys, monkeypatch):
    """Some shells export COLUMNS=0 where they have no terminal."""
    monkeypatch.setenv("COLUMNS", "0")
    assert LONG in printed(capsys, {"op": "linear", "why": LONG})


def test_a_narrow_terminal_shows_the_whole_name_of_an_op(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    out = printed(capsys, {"op": "silu_and_mul_with_clamp", "why": LONG})
    assert "silu_and_mul_with_clamp" in out
    assert max(map(len, out.splitlines())) <= 50


@pytest.mark.parametrize("width", [80, 160])
def test_a_long_list_of_kernels_is_a_table_only_where_its_columns_can_be_read(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [
        {"op": "linear", "kernel": name, "variants": variants, "devices": "cpu", "supports": LONG}
        for name, variants in (("cpp", None), ("cpu", "dense, sparse"))
    ]
    print_table("Kernels", ("op", "kernel", "variants", "devices", "supports"), rows, listed_if_narrow=True)
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= width
    if width == 160:
        assert "│" in out
        return
    assert lines == [
        "Kernels",
        "linear",
        "  cpp  devices: cpu",
        "       supports: first kernel for cpu that supports it, and a reason that is",
        "       wider than a narrow terminal",
        "  cpu  variants: dense, sparse; devices: cpu",
        "       supports: first kernel for cpu that supports it, and a reason that is",
        "       wider than a narrow terminal",
    ]
