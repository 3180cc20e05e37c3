"""Kernels that are compiled ahead: in other threads, without being launched, and ready for their first launch.

Afterwards, launches can do without the comparison of their constants.
"""

import threading

import pytest
from compiling import printed

SCRIPT = """
import json, threading
import compile_only, torch, triton
import triton.language as tl
from triton.runtime import driver
from vllm_opset import ops
from vllm_opset.kernel import kernels_of
from vllm_opset.kernels.triton import rms_norm
from vllm_opset.kernels.triton._constants import assume_unchanged
from vllm_opset.kernels.triton._precompile import precompile

launched, launchers, compiled, threads = [], [], compile_only._recorded(), set()
triton.knobs.compilation.listener = lambda **_: threads.add(threading.get_ident())

class Counting(compile_only.CompileOnly):
    def launcher_cls(self, source, metadata):
        launchers.append(threading.get_ident())
        return lambda *_: launched.append(metadata.name)

triton.runtime.driver.set_active(Counting())
calls = [
    (kernels_of(name)["triton"], sample.make())
    for name in ("rms_norm", "rope_cache") for sample in list(ops.BY_NAME[name].samples("cpu", torch.bfloat16))[:2]
]

def call_all():
    for kernel, (args, kwargs) in calls:
        kernel.run(*args, **kwargs)
    return len(launched), len(compiled)

def ours():
    functions = [value for value in vars(rms_norm).values() if isinstance(value, triton.runtime.jit.JITFunction)]
    return [function for function in functions if function.hash is not None]

with precompile():
    call_all()
before = len(launched), len(compiled), len(launchers), threading.get_ident() in threads | set(launchers)

@triton.jit
def theirs(x):
    tl.store(x, 1)

@triton.jit
def broken(x):
    tl.store(x, no_such_name)

broken.module = "vllm_opset.test"
x, errors = torch.zeros(1), []
with precompile():
    theirs[(1,)](x)
    broken[(1,)](x)
their_launches = launched.count("theirs")
with precompile("test.module"):
    theirs.module = "test.module"
    theirs[(1,)](x.int())
theirs_compiled = [kernel.metadata.name for kernel in compiled].count("theirs")
try:
    broken[(1,)](x)
except triton.CompilationError as error:
    errors.append(str(error))
of_this_thread, other = len(launched), threading.Thread(target=call_all)
with precompile():
    call_all()
    other.start()
    other.join()
of_another = len(launched) - of_this_thread
last = call_all()
checked = sum(len(kernel.used_global_vals) for kernel in ours())
assume_unchanged()
launches = len(launched)
call_all()
after = checked, sum(len(kernel.used_global_vals) for kernel in ours()), len(launched) - launches, len(compiled)
of_theirs = their_launches, launched.count("theirs"), theirs_compiled
print(json.dumps([before, of_another, last, of_theirs, errors, after]))
"""


def test_kernels_are_compiled_and_not_launched(tmp_path):
    before, of_another_thread, (launched_then, compiled_then), theirs, errors, after = printed(SCRIPT, tmp_path)
    launched, compiled, launchers, in_this_thread = before
    assert launched == 0 and compiled == launchers >= 2 and not in_this_thread
    assert theirs == [1, 1, 2], "a kernel that is not opset's has to run, unless its module is named"
    assert of_another_thread == 4, "what another thread calls has to run"
    assert launched_then == of_another_thread + 4 + 1 and compiled_then == compiled + 2
    compared, compared_after, launched_after, compiled_after = after
    assert compared > 0 and compared_after == 0, "constants have to be compared until then, and not afterwards"
    assert (launched_after, compiled_after) == (4, compiled_then)
    assert len(errors) == 1 and "no_such_name" in errors[0], "it has to raise when it is called again"


def test_two_threads_leave_triton_as_it_was():
    """Otherwise the first thread's kernels would never be launched again."""
    pytest.importorskip("triton", reason="compiles Triton's kernels: runs where there is Triton")
    from triton.runtime.jit import JITFunction

    from vllm_opset.kernels.triton._precompile import precompile

    run, entered, leave = JITFunction.run, threading.Event(), threading.Event()

    def compile_in_another_thread() -> None:
        with precompile():
            entered.set()
            leave.wait()

    other = threading.Thread(target=compile_in_another_thread)
    with precompile():
        other.start()
        entered.wait(0.2)  # long enough for the other thread to enter, unless it is blocked
    leave.set()
    other.join()
    assert JITFunction.run is run
