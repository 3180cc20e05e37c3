"""This package and vLLM call each other with matching signatures, on every supported release.

A method that overrides one of vLLM's accepts every call that vLLM's method accepts. A function that replaces one of
vLLM's accepts the calls that vLLM makes. vLLM's functions accept the calls that this package makes.
"""

import importlib
import sys
from types import ModuleType

import pytest
from signatures import Calls, calls_of, is_method, method, overridden, parameters, refused, why_not
from surface import module_names, pretended_devices

from vllm_opset.model import int4_experts
from vllm_opset.platform.bridges import find, has
from vllm_opset.platform.quantised_layers import OF_INT4_EXPERTS, QUANTISATION

pytestmark = pytest.mark.window

# This package alone builds objects of these classes, mostly from objects that vLLM built.
BUILT_HERE = {
    "vllm_opset.model.packed_linear.PackedEmbeddingMethod",
    "vllm_opset.model.packed_linear.PackedLinearMethod",
    "vllm_opset.model.sampler.Fp32Sampler",
    "vllm_opset.platform.cpu.sampler.OpsetCpuSampler",
    "vllm_opset.model.linear.CompiledLinearMethod",
    "vllm_opset.model.linear.EmbeddingMethod",
    "vllm_opset.model.linear.LinearMethod",
    "vllm_opset.model.bound_experts.BoundExpertsMethod",
    "vllm_opset.model.sampler.OpsetSampler",
    "vllm_opset.model.sampler._States",
    "vllm_opset.platform.v1.sampler.OpsetSampler",
    "vllm_opset.model.int4_experts.Int4ExpertsMethod",  # the base of those below; no object is of this class alone
}
# Pairs of vLLM's class and this package's, which vLLM builds in its place. Neither is a subclass of the other. They are
# found while tests are collected. Later, the worker of an engine in this process may have replaced vLLM's classes.
IN_PLACE = [
    (find(theirs), ours)
    for theirs, ours in (
        (f"{OF_INT4_EXPERTS}.CompressedTensorsWNA16MoEMethod", int4_experts.OpsetCompressedExpertsMethod),
        (f"{OF_INT4_EXPERTS}_marlin.CompressedTensorsWNA16MarlinMoEMethod", int4_experts.OpsetCompressedExpertsMethod),
        (f"{QUANTISATION}.auto_awq.AutoAWQMoEMethod", int4_experts.OpsetAwqExpertsMethod),
        (f"{QUANTISATION}.auto_gptq.AutoGPTQMoEMethod", int4_experts.OpsetGptqExpertsMethod),
    )
    if has(theirs)()  # vLLM 0.26 alone has the second
]
# Imported in functions that only the releases which have these call. vLLM removes its IR after 0.33.
OF_SOME_RELEASES = {
    "vllm.config.kernel.IrOpPriorityConfig",
    "vllm.ir",
    "vllm.triton_utils.dispatcher.register_kernels",
    "vllm.v1.kv_cache_layout.KVCacheLayout",
    "vllm.v1.worker.gpu.spec_decode.ngram.speculator",
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator.StandaloneARSpeculator",
}


@pytest.fixture(scope="module")
def modules() -> list[ModuleType]:
    """All modules of this package, including those for absent devices."""
    with pretended_devices():
        return [importlib.import_module(name) for name in module_names()]


def test_overridden_methods_take_what_vllms_take(modules):
    pairs = [(cls, name, base) for module in modules for cls, name, base in overridden(module)]
    assert len(pairs) > 100
    replacements = {ours for _, ours in IN_PLACE}
    bad = [
        f"{cls.__qualname__}.{name} of {cls.__module__} refuses {calls}"
        for cls, name, base in pairs
        if not (name == "__init__" and (cls in replacements or f"{cls.__module__}.{cls.__qualname__}" in BUILT_HERE))
        and (calls := refused(method(base, name), method(cls, name)))
    ]
    assert not bad, "\n".join(bad)


def test_classes_in_place_of_vllms_take_what_these_take():
    pairs = [
        (theirs, ours, name)
        for theirs, ours in IN_PLACE
        for name, value in vars(theirs).items()
        if is_method(value) and hasattr(ours, name)
    ]
    assert len(pairs) >= 4 * len(IN_PLACE)
    bad = [
        f"{ours.__qualname__}.{name} in place of {theirs.__qualname__}'s refuses {calls}"
        for theirs, ours, name in pairs
        if (calls := refused(method(theirs, name), method(ours, name)))
    ]
    assert not bad, "\n".join(bad)


def test_vllms_functions_take_the_calls_of_this_package(modules):
    found = [(module, *call) for module in modules for call in Calls(module).found]
    assert len(found) > 50
    bad = [
        f"{module.__name__}:{line}: {function.__qualname__}: {reason}"
        for module, line, function, *given in found
        if (reason := why_not(function, *given))
    ]
    assert not bad, "\n".join(bad)


def test_what_is_imported_while_serving_is_there(modules):
    """Imports at the top of a module are tested by importing the module."""
    missing = {name for module in modules for name in Calls(module).missing}
    assert missing <= OF_SOME_RELEASES


def test_layers_take_what_vllms_take():
    """The `forward_oot` of each class becomes its `forward`."""
    from vllm_opset.model import registration

    registered = {id(layer): layer for layer in _registries()}.values()
    assert len(registered) >= len(registration.REPLACEMENTS) - 3
    bad = [
        f"{layer.__name__} refuses {calls}"
        for layer in registered
        if (calls := refused(_forward_native(layer), method(layer, "forward_oot")))
    ]
    assert not bad, "\n".join(bad)


def _registries():
    from vllm_opset.model import layers, registration

    for name in (registration.REGISTRY, registration.HW_AGNOSTIC_REGISTRY):
        registry = getattr(sys.modules.get(name), "op_registry_oot", {})
        yield from (layer for layer in registry.values() if issubclass(layer, layers.OpsetLayer))


def _forward_native(layer: type):
    return method(next(base for base in layer.__mro__ if base.__module__.startswith("vllm.")), "forward_native")


def in_place_of_vllms():
    """(name, the module of vLLM that calls it, this package's replacement), for every function without a hook."""
    from vllm.config import vllm as vllm_config
    from vllm.model_executor.models import registry
    from vllm.v1.worker import block_table, gpu_worker

    from vllm_opset.platform import compat
    from vllm_opset.platform.cuda import warm_up
    from vllm_opset.platform.npu import worker as npu_worker
    from vllm_opset.platform.v1 import slots

    yield "_run_in_subprocess", registry, compat._here
    yield "compute_slot_mapping", block_table, slots.compute_slot_mapping.__get__(object())
    yield "kernel_warmup", gpu_worker, warm_up.kernels
    yield "kernel_warmup", gpu_worker, npu_worker._one_step
    if hasattr(vllm_config.VllmConfig, "_maybe_enable_breakable_cudagraph"):
        yield "_maybe_enable_breakable_cudagraph", vllm_config, lambda: None


def test_what_is_put_in_place_of_vllms_functions_takes_its_calls():
    for name, module, ours in in_place_of_vllms():
        calls = calls_of(name, module)
        assert calls, f"{module.__name__} does not call {name}"
        assert [reason for call in calls if (reason := why_not(ours, *call))] == [], name


def test_a_call_that_would_be_refused_is_found():
    """Tests a method that gained a parameter in the middle, and one that lost a parameter."""

    def before(logits, rows, positions, *, seed=0): ...

    def now(logits, rows, numbers, positions, *, seed=0): ...

    assert refused(now, before) and refused(before, now) and not refused(now, now)
    assert not refused(before, lambda *args, **kwargs: None)
    assert why_not(now, 3, []) and why_not(now, 4, ["sead"]) and not why_not(now, 3, ["positions"])
    assert not why_not(now, None, []) and len(parameters(now)) == 5
