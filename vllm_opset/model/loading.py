"""Checks of a layer's quantised weights before, while and after they are loaded. Errors name the tensor.

vLLM does not notice a tensor that a checkpoint lacks. It keeps what was in memory. So loaders note which parts they
load, and a layer asks for all parts each time its weights were loaded. It does not ask if its loaders noted nothing, as
with `--load-format dummy`. For a layer that the checkpoint lacks as a whole, scales are therefore NaN at first, and
`schemes.check_scale` raises for NaN. A layer whose scales vLLM computes asks in any case (`is_read`). When weights are
loaded again, vLLM keeps the old weights of a layer that the checkpoint lacks as a whole.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType

import torch

from vllm_opset.ops.schemes import UINT4_BLOCK, WHOLE
from vllm_opset.unsupported import Refusal

# A part of a fused layer by vLLM's name of it, and the expert that it belongs to. None stands for all.
Part = tuple[int | str | None, int | None]
ALL: Part = (None, None)
# vLLM's names of weights and zero points. GPTQ's `qzeros` are ignored: opset serves symmetric GPTQ alone.
VALUES = ("weight", "qweight", "weight_packed", "weight_zero_point")
AWQ_VALUES = ("qweight", "qzeros")
# Cures where the number of workers matters.
FEWER_WORKERS = "give a smaller --tensor-parallel-size"
FEWER_OF_EXPERTS = f"{FEWER_WORKERS}, or --enable-expert-parallel"
MOST = 8  # of missing parts that an error names
NOTED = "opset_loaded"  # the attribute of a loader with the parts that it has loaded since they were last checked


def refusal(feature: str, cure: str) -> Refusal:
    """The error for what opset does not support of a layer. It names the device, as those for configurations do."""
    from vllm.platforms import current_platform  # imported late: vLLM asks for its platform while it is imported

    return Refusal(f"vllm-opset {current_platform.where} does not support {feature}: {cure}.")


class Misfit(ValueError):
    """A tensor cannot be loaded. The message names it."""


def prefix_of(layer: torch.nn.Module) -> str:
    """The name of a layer in its model, or its class: up to vLLM 0.30, a language model head does not know its name."""
    names = (getattr(layer, name, None) for name in ("prefix", "layer_name"))
    return next(filter(None, names), type(layer).__name__)


def check_blocks(layer: torch.nn.Module, block: Sequence[int], widths: Sequence[int], out_features: int) -> None:
    """Raise Refusal if a part of a fused layer ends inside a block of rows that share scales.

    The next part then begins inside the block. vLLM places its scales from the next block on. Read as the scales of the
    whole weight, they would belong to other rows.

    block: the rows and columns of weights that share a scale. widths: the rows of each part in this worker.
    out_features: the rows in all workers.
    """
    is_split = sum(widths) < out_features  # so the last part, too, goes on in the next worker
    if not any(width % block[0] for width in (widths if is_split else widths[:-1])):
        return
    cure = FEWER_WORKERS if is_split else "choose a checkpoint with scales per channel"
    raise refusal(
        f"fp8 blocks of {' x '.join(map(str, block))} in {prefix_of(layer)}, whose parts of "
        f"{', '.join(map(str, widths))} rows end inside a block",
        cure,
    )


def check_columns(
    layer: torch.nn.Module, weights: str, columns: int, multiple: int, workers: int = 1, fewer: str = FEWER_OF_EXPERTS
) -> None:
    """Raise Refusal for weights of a layer whose rows are no whole groups of one scale.

    weights: what the message calls them. columns: those in this worker. multiple: their number must be one of this.
    workers: how many share the columns. fewer: the cure if fewer workers help.
    """
    if columns % multiple:
        is_cut = columns * workers % multiple == 0
        raise refusal(
            f"{weights} with {columns} columns in {prefix_of(layer)}, which are no multiple of {multiple}",
            fewer if is_cut else "choose another checkpoint",
        )


def check_groups(layer: torch.nn.Module, group_size: int, columns: int, all_columns: int) -> None:
    """Raise Refusal for int4 weights of a linear layer whose rows are no whole groups of one scale.

    group_size: the columns that share a scale, or WHOLE, for which kernels ask for a multiple of 32. columns: those in
    this worker. all_columns: those in all workers.
    """
    multiple = UINT4_BLOCK if group_size == WHOLE else group_size
    check_columns(layer, "int4 weights", columns, multiple, all_columns // columns, FEWER_WORKERS)


def check_blocks_of_experts(
    layer: torch.nn.Module, block: Sequence[int], is_split: bool, width: int, hidden_size: int, workers: int
) -> None:
    """Raise Refusal for fp8 blocks of experts whose scales vLLM cannot load. The halves of w13 must not share a block.

    block: the rows and columns of weights that share a scale. is_split: whether vLLM gives the scales to smaller
    blocks, which fit the width of a worker. It loads them if all blocks of the checkpoint are whole. width: the
    intermediate size in this worker. workers: how many share the columns of each expert.
    """
    is_loaded = is_split and not any(hidden_size % size for size in block)
    columns, sharing = (width * workers, 1) if is_loaded else (width, workers)
    for multiple in block if is_loaded or workers > 1 else block[:1]:
        check_columns(layer, f"fp8 experts by blocks of {' x '.join(map(str, block))}", columns, multiple, sharing)


def watch(layer: torch.nn.Module) -> None:
    """Mark the scales of a layer whose parameters were just created, and have loaders name and note what they load.

    A loader then raises Misfit, with the name of the tensor and the first error, for one that it cannot load.
    """
    for name, parameter in layer.named_parameters(recurse=False):
        if "scale" in name and parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
        load = getattr(parameter, "weight_loader", None)
        if load is not None:
            parameter.weight_loader = _watched(load, prefix_of(layer), name)


def _watched(load: Callable, prefix: str, name: str) -> Callable:
    """The loader with its errors named and its parts noted. A bound method stays one.

    vLLM keeps loaders for a later reload. It can cut the layer off bound methods alone (`sanitize_layer_refs`). With
    another reference to it, the layer would never be freed.
    """
    if inspect.ismethod(load):
        return MethodType(_watched(load.__func__, prefix, name), load.__self__)
    signature, noted = inspect.signature(load), set()

    @functools.wraps(load)
    def watched(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        parameter, loaded, *_ = (one for one in given.values() if isinstance(one, torch.Tensor))
        shard, expert = _part(given)
        with naming(f"{prefix}.{name}", (shard, expert), parameter, loaded):
            result = load(*args, **kwargs)
        shards = shard if isinstance(shard, tuple) else (shard,)
        noted.update((one, None if loaded.ndim == 3 else expert) for one in shards)
        return result

    setattr(watched, NOTED, noted)
    return watched


@contextmanager
def naming(name: str, part: Part, parameter: torch.Tensor, stored: torch.Tensor) -> Iterator[None]:
    """Within this context, an error of a loader becomes Misfit. Its message names the tensor and quotes the error.

    name: that of the parameter, in its model. part: what the tensor is of it. stored: the tensor of the checkpoint.
    """
    try:
        yield
    except (torch.OutOfMemoryError, Misfit):  # the first is a RuntimeError, and no fault of the tensor
        raise
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        raise Misfit(
            f"{name}{_said([part])} cannot be loaded: {list(stored.shape)} in the checkpoint, into "
            f"{list(parameter.shape)} (all parts, in this worker): {error!r}"
        ) from error


def _part(given: Mapping) -> Part:
    """The part that a loader is called for. given: its arguments. Loaders of experts give them other names."""
    return given.get("loaded_shard_id", given.get("shard_id")), given.get("expert_id")


def _said(parts: Iterable[Part]) -> str:
    """Names of parts, in parentheses; empty for a whole tensor."""
    named = [str(shard) if expert is None else f"{shard} of expert {expert}" for shard, expert in parts]
    return "" if named == [str(None)] else f" ({', '.join(named)})"


def check_linear(layer: torch.nn.Module, names: Sequence[str] = VALUES, is_read: bool = False) -> None:
    """Raise ValueError, with its name, for a tensor of a linear layer that the checkpoint lacks, or a part of it.

    names: of those that are asked for beside all scales. is_read: see `pop_loaded`.
    """
    number = len(getattr(layer, "output_partition_sizes", ()))  # a head has none
    for name, noted in _checked(pop_loaded(layer, is_read), names):
        if not noted:
            _check(layer, name, noted, [ALL])
        elif number > 1:
            of_attention = any(isinstance(shard, str) for shard, _ in noted)
            _check(layer, name, noted, [(shard, None) for shard in ("qkv" if of_attention else range(number))])


def check_experts(layer: torch.nn.Module, names: Sequence[str] = VALUES, is_read: bool = False) -> None:
    """The same for a layer of experts. names: without "w13_" and "w2_"."""
    mapped = layer.expert_map
    experts = range(layer.local_num_experts) if mapped is None else (mapped >= 0).nonzero().flatten().tolist()
    halves = ("w1", "w3") if layer.moe_config.is_act_and_mul else ("w1",)
    loaded = pop_loaded(layer, is_read)
    for weight, shards in (("w13_", halves), ("w2_", ("w2",))):
        for name, noted in _checked(loaded, names, weight):
            _check(layer, name, noted, [(shard, expert) for expert in experts for shard in shards])


def pop_loaded(layer: torch.nn.Module, is_read: bool = False) -> dict[str, set[Part]]:
    """The parts that were loaded since the last call, by the names of parameters that are watched.

    It is empty if no loader was called for this layer, as with `--load-format dummy`, unless a checkpoint `is_read`.
    """
    loaders = {name: getattr(one, "weight_loader", None) for name, one in layer.named_parameters(recurse=False)}
    noted = {name: getattr(load, NOTED) for name, load in loaders.items() if hasattr(load, NOTED)}
    found = {name: set(parts) for name, parts in noted.items()}
    for parts in noted.values():
        parts.clear()
    return found if is_read or any(found.values()) else {}


def _checked(
    loaded: Mapping[str, set[Part]], names: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, set[Part]]]:
    """Those of the parameters with this prefix that are scales or have one of the names."""
    for name, noted in loaded.items():
        own = name.removeprefix(prefix)
        if name.startswith(prefix) and (own in names or "scale" in own):
            yield name, noted


def _check(layer: torch.nn.Module, name: str, noted: set[Part], wanted: Iterable[Part]) -> None:
    missing = [part for part in wanted if noted.isdisjoint({part, (part[0], None), ALL})]
    if missing:
        raise ValueError(f"{prefix_of(layer)}.{name}{_said(missing[:MOST])} is missing in the checkpoint")
