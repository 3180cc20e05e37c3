"""Launches like earlier ones run the kernels that Triton would find for them, with the same arguments."""

from compiling import printed

SCRIPT = """
import json
from collections import namedtuple
import compile_only, torch, triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction
from vllm_opset.kernels.triton import _launch
from vllm_opset.kernels.triton._products.load_sm90 import box_layout

launched = []

class Recording(compile_only.CompileOnly):
    def launcher_cls(self, source, metadata):
        return lambda *args: launched.append((source, args[:3], args[9:]))

triton.runtime.driver.set_active(Recording())

@triton.jit(do_not_specialize=["size"])
def kernel(x, rows, number, size, FIRST: tl.constexpr, LAST: tl.constexpr = 3):
    pass

@gluon.jit
def boxes(x, FIRST: gluon.language.constexpr):
    pass

Rows, Others = namedtuple("Rows", "inner outer"), namedtuple("Others", "inner outer")
x = torch.zeros(64, 64, dtype=torch.bfloat16)
calls = {"a call": (kernel, (x, Rows(2, 3), 5, 6), {"FIRST": 1, "num_warps": 4})}
def change(name, place, value, **constants):
    function, args, given = calls["a call"]
    calls[name] = function, (*args[:place], value, *args[place + 1:]), given | constants
change("another address", 0, torch.ones_like(x))
change("another dtype", 0, x.view(torch.float16))
change("an address that is no multiple of 16", 0, x.view(-1)[1:])
change("no tensor", 0, None)
change("a parameter", 0, torch.nn.Parameter(x))
change("no tuple", 1, None)
change("another tuple", 1, Rows(1, 16))
change("a tuple with other names", 1, Others(2, 3))
for value in (1, 16, 17, 0, -1, 2**31, 2**40, 2**63, True, 1.0, 5.0, None):
    change(f"the number {value!r}", 2, value)
    change(f"the size {value!r}", 3, value)
change("another constant", 0, x, FIRST=2)
change("a constant that is true", 0, x, FIRST=True)
change("a constant with a default", 0, x, LAST=4)
change("another option", 0, x, num_warps=8)
for width, swizzle in ((64, 128), (32, 64), (32, 32)):
    described = TensorDescriptor.from_tensor(x, [64, width], box_layout(swizzle, 16))
    calls[f"boxes of {width}, {swizzle}"] = boxes, (described,), {"FIRST": 1}
described = TensorDescriptor.from_tensor(x.view(torch.float16), [64, 64], box_layout(128, 16))
calls["boxes of another dtype"] = boxes, (described,), {"FIRST": 1}

wrong, searched, run = [], [], JITFunction.run

def search(self, *args, **kwargs):
    searched.append(self.__name__)
    return run(self, *args, **kwargs)

JITFunction.run = _launch._RUN = search
searches = []
for _ in range(2):
    for name, (function, args, constants) in calls.items():
        _launch.launch(function, (3, 2), *args, **constants)
    searches.append(len(searched))
for name, (function, args, constants) in calls.items():
    launched.clear()
    _launch.launch(function, (3, 2), *args, **constants)
    function[(3, 2)](*args, **constants)
    (own, grid, given), (source, *others) = launched
    same = all(one is other or one == other for one, other in zip(given, others[1], strict=True))
    if own is not source or grid != others[0] or not same:
        wrong.append(name)
JITFunction.run = lambda self, *args, **kwargs: searched.append("replaced")
_launch.launch(kernel, (3, 2), *calls["a call"][1], **calls["a call"][2])
last = searched[-1]
JITFunction.run = search
try:
    refused = _launch.launch(kernel, (3, 2), x, None, 5, 6, 1, num_warps=4)
except AssertionError as error:
    refused = str(error)
print(json.dumps([wrong, len(calls), searches, last, refused]))
"""


def test_a_launch_like_an_earlier_one_is_the_one_that_triton_would_make(tmp_path):
    wrong, num_calls, (first, second), last, refused = printed(SCRIPT, tmp_path)
    assert not wrong
    assert first > num_calls / 2 and second == first, "Triton has to find the kernel of each call once"
    assert last == "replaced", "while Triton's function is replaced, all launches go there"
    assert refused == "kernel takes FIRST by its name"


OPS = ("rms_norm", "silu_and_mul", "rope_cache", "linear", "paged_attention", "top_k_top_p_sample")
SECOND_CALLS = """
import json, sys
import compile_only, torch, triton
from triton.runtime.jit import JITFunction
from vllm_opset import ops, targets
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import _launch

triton.runtime.driver.set_active(compile_only.CompileOnly())
searched, run = [], JITFunction.run

def search(self, *args, **kwargs):
    searched.append(self.__name__)
    return run(self, *args, **kwargs)

JITFunction.run = _launch._RUN = search
found = {}
with targets.instead(compile_only.HOPPER):
    for name in %r:
        kernel, calls = kernels_of(name)["triton"], [[], []]
        samples = iter(ops.BY_NAME[name].samples("cpu", torch.bfloat16))
        while not calls[0]:  # PyTorch's kernel serves some samples of linear
            args, kwargs = next(samples).make()
            for call in calls:
                searched.clear()
                kernel.run(*args, **kwargs)
                call += searched
        found[name] = calls
print(json.dumps(found))
"""


def test_the_ops_of_a_layer_search_no_kernel_when_they_are_called_again(tmp_path):
    found = printed(SECOND_CALLS % (OPS,), tmp_path)
    assert found.keys() == set(OPS) and all(first for first, _ in found.values())
    assert not any(second for _, second in found.values()), found
