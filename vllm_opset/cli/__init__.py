"""The command `vllm-opset`: lists kernels, explains the choice among them, checks them and times them."""

import importlib.util

import typer

from vllm_opset.cli import autoload  # noqa: F401  before anything that imports torch

# isort: split
from vllm_opset import selection
from vllm_opset.cli import bench, demo, doctor, e2e, ops, parity

app = typer.Typer(
    help="vllm-opset: which kernel runs each of vLLM's ops on this machine, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def read_overrides() -> None:
    """Import the user's kernels and check the overrides in the environment, before any command."""
    try:
        selection.configure()
    except selection.OverrideError as error:
        raise typer.BadParameter(str(error), param_hint="environment") from error


app.command("ops")(ops.list_ops)
app.command("doctor")(doctor.examine)
app.command("parity")(parity.check)
benchmarks = typer.Typer(cls=bench.KernelsByDefault, help="Time kernels and their peers, or whole engines: bench e2e.")
benchmarks.command(bench.KERNELS)(bench.bench)
benchmarks.command("e2e")(e2e.compare)
app.add_typer(benchmarks, name="bench")
app.command("demo")(demo.answer)
if importlib.util.find_spec("triton"):
    from vllm_opset.cli import tune

    app.command("tune")(tune.find)


def main() -> None:
    """Run the command line: the package's entry point."""
    app()
