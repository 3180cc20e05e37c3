"""Functions of Gluon, the language below Triton, that have other names in other releases of Triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_memory = gl.shared_memory_descriptor
# A barrier of all threads of a program. Triton 3.6 has it under another name.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# reinterpret(memory, dtype, shape, layout): the same shared memory with another type, shape or layout. It is a public
# method since Triton 3.9.
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
# Copies to shared memory by a program's threads (cp.async), and by the copy engine (TMA), which copies back as well.
# Triton 3.6 has other names, which 3.9 no longer has.
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
