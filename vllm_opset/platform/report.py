"""A report of the kernels that were chosen in this process, for the log and for callers of a worker."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_opset import selection
from vllm_opset.kernel import why_unavailable
from vllm_opset.platform import refusals

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")


class Reporting:
    """A mixin that comes before vLLM's worker among the bases.

    choices: those of its engine, as a process may have several engines.
    """

    rank: int
    choices: selection.Choices

    def __init__(self, vllm_config: "VllmConfig", *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        selection.configure(vllm_config.additional_config)
        self.choices = selection.forget()

    def log_choices(self) -> None:
        """Log the choices. All are made once the weights are loaded and the layers built."""
        if self.rank == 0:
            logger.info("%s", table(self.choices))

    def check_choices(self) -> None:
        """Log the choices, and raise Refusal for one that cannot be captured in a graph."""
        self.log_choices()
        if refusals.captures(self.vllm_config):
            refusals.check_graphs(selection.choices(self.choices))

    def opset_report(self) -> list[dict]:
        """The kernel that serves each op in this worker: `llm.collective_rpc("opset_report")`."""
        return rows(self.choices)


def rows(made: selection.Choices) -> list[dict]:
    """One row per op and problem: op, problem, kernel, reason, and calls, which are counted if OPSET_COUNT_CALLS=1.

    variants: the calls that each variant of the kernel ran, for a kernel that has variants.
    """
    return [
        {
            "op": choice.op,
            "problem": str(choice.problem),
            "kernel": choice.name,
            "reason": choice.reason,
            "calls": choice.calls.total(),
            "variants": {name: number for name, number in choice.calls.items() if name is not None},
        }
        for choice in selection.choices(made)
    ]


def table(made: selection.Choices) -> str:
    """The rows as a table, one line each. Lines on unavailable kernel providers come first."""
    columns = [(row["op"], row["kernel"], row["reason"], row["problem"]) for row in rows(made)]
    widths = [max((len(row[i]) for row in columns), default=0) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in columns
    ]
    missing = [
        f"kernels/{provider} cannot be used here: {reason}"
        for provider in selection.PREFERENCE[current_platform.device_type]
        if (reason := why_unavailable(provider))
    ]
    return "\n".join([*missing, "vllm-opset: op, kernel, reason, problem", *lines])
