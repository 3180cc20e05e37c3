"""The formats of int4 weights by groups that are served: AWQ, GPTQ and compressed-tensors, by their configurations."""

from collections.abc import Iterator, Mapping

from vllm_opset.ops.schemes import WHOLE, is_int4_group

AWQ = ("awq", "auto_awq", "awq_marlin")
GPTQ = ("gptq", "auto_gptq", "gptq_marlin")
ACTIVATION_ORDER = "activation ordering by groups (act-order; static ordering is served)"


def unserved_by_awq(checkpoint: Mapping) -> Iterator[str]:
    """Names each feature of an AWQ checkpoint that is not served. checkpoint: its quantization_config."""
    bits, group = (
        checkpoint.get(new, checkpoint.get(old)) for new, old in (("bits", "w_bit"), ("group_size", "q_group_size"))
    )
    yield from _unserved_sizes("AWQ", bits, group)
    if not checkpoint.get("zero_point", True):
        yield "AWQ without zero points"
    if str(checkpoint.get("version", "gemm")).lower() != "gemm":
        yield f"AWQ's layout {checkpoint['version']}"
    if checkpoint.get("lm_head"):
        yield "an AWQ language model head"


def unserved_by_gptq(checkpoint: Mapping) -> Iterator[str]:
    """Names each feature of a GPTQ checkpoint that is not served. checkpoint: its quantization_config."""
    if checkpoint.get("lm_head"):
        yield "a GPTQ language model head"
    if checkpoint.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2", ""):
        yield f"GPTQ's layout {checkpoint['checkpoint_format']}"
    # A rule of `dynamic` changes layers whose names match, or with "-:" leaves them as they are.
    rules = (rule for name, rule in (checkpoint.get("dynamic") or {}).items() if not name.startswith("-:"))
    for settings in ({}, *rules):
        layers = {**checkpoint, **settings}
        yield from _unserved_sizes("GPTQ", layers.get("bits"), layers.get("group_size"))
        if not layers.get("sym", True):
            yield "GPTQ with zero points (asymmetric weights)"
        if layers.get("desc_act") and layers.get("group_size") != WHOLE:
            yield f"GPTQ's {ACTIVATION_ORDER}"


def _unserved_sizes(method: str, bits: int | None, group: int | None) -> Iterator[str]:
    if bits is None or group is None:
        yield f"{method} whose quantization_config is not in config.json"
    elif bits != 4:
        yield f"{bits}-bit {method}"
    elif not is_int4_group(group):
        yield f"{method} groups of {group}"


def is_int4(weights: Mapping) -> bool:
    """Whether a group of compressed-tensors has weights of 4 bits by groups, or a scale for each row."""
    return (weights.get("type"), weights.get("num_bits")) == ("int", 4) and weights.get("strategy") in (
        "group",
        "channel",
    )


def unserved_by_compressed_tensors(group: Mapping, layout: str) -> Iterator[str]:
    """Names each feature of int4 weights that is not served. layout: the format of the whole checkpoint."""
    weights, layout = group["weights"], group.get("format") or layout
    size = weights.get("group_size") if weights["strategy"] == "group" else WHOLE
    if layout != "pack-quantized":
        yield f"int4 weights in the layout {layout}"
    if any(group.get(name) for name in ("input_activations", "output_activations")):
        yield "int4 weights for quantised activations"
    if not is_int4_group(size):
        yield f"int4 weights in groups of {size}"
    if weights.get("actorder") not in (None, False, "static", "weight"):
        yield f"int4 weights with {ACTIVATION_ORDER}"
