"""A benchmark's probe of an engine's workers, through vLLM's `worker_extension_cls`. Needs only vLLM and torch."""

import importlib.util
import resource

import torch

_compiled: list[str] = []


def _note(*, metadata: dict, **_) -> None:
    _compiled.append(metadata["name"])


if importlib.util.find_spec("triton"):
    from triton import knobs

    # Triton calls it for every kernel that a process compiles or loads from the cache on disk. Both make a request
    # wait.
    knobs.compilation.listener = _note


class Probe:
    """A mixin for the worker's class."""

    def benchmark_probe(self) -> dict:
        """device: its name, None for a CPU. compiled: the Triton kernels since the last call. peak_bytes: so far."""
        compiled = _compiled.copy()
        _compiled.clear()
        if self.device.type == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return {"device": None, "compiled": compiled, "peak_bytes": peak}
        module = torch.get_device_module(self.device)
        name, peak = module.get_device_name(self.device), module.max_memory_reserved(self.device)
        return {"device": name, "compiled": compiled, "peak_bytes": peak}
