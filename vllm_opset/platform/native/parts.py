"""The parts of opset that are on, on stock vLLM.

`attention` is opset's attention backend, which `--attention-backend CUSTOM` asks for, too. With it, longer steps are
captured (`platform/cuda/graphs.py`), on Hopper GPUs in full graphs (`platform/cuda/full_graphs.py`).

`sampler` is one kernel for temperature, min-p, top-k, top-p and the draw. `linear` is for linear layers with
unquantised weights, and with weights in fp8, int8 and int4.

`ops` are norms, activations and rotary embeddings, fused by hand. torch.compile is off then, unless users give a mode.
With a mode, the compiler sees each op as an operator, and nothing is fused by hand.

`moe` is for experts with unquantised weights, with fp8 and int8 weights that vLLM stores for its Triton kernels, and
with int4 and MXFP4 weights. It chooses the experts, too.

defaults.yaml lists the parts that are on by default on a GPU family, and the evidence for each kind of model and
engine. A part stays off for a kind in which it was not measured, or in which vLLM's own code is faster in some cases.
Users override this by `--additional-config '{"opset": {"native": {"attention": "on"}}}'`, by the key `native` of the
file that OPSET_CONFIG names, or by OPSET_NATIVE="attention=on,sampler=off". If a part that is on by default does not
support the configuration, vLLM's own code runs. If a user asked for the part, that is an error.

The parts are decided once for an engine (`decide_once`), because vLLM changes its configuration later. A draft model's
copy has another model and no parallelism. With data parallelism, vLLM tells each engine that it is the only one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_opset.platform import switches
from vllm_opset.platform.cuda import device
from vllm_opset.platform.native import evidence
from vllm_opset.platform.native.rules import RULES, WHERE, is_ours
from vllm_opset.platform.refusals import Rule
from vllm_opset.platform.switches import PARTS, Switch
from vllm_opset.unsupported import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# The key of vLLM's additional configuration for the parts that are on: their names, and whether a user asked for each.
# Every copy of the configuration has it, also in other processes. It is a part of the key of vLLM's compile cache: an
# engine cannot use graphs that were compiled with other parts.
KEY = "opset_parts"
BACKEND_OPTION = "--attention-backend CUSTOM"


class Decision(NamedTuple):
    """Whether a part is on, and the reason, in words for the log."""

    on: bool
    why: str


def decide_once(config: "VllmConfig", family: int) -> dict[str, Decision]:
    """Decide on the parts of an engine, and keep the decisions in its configuration for `kept`.

    Returns nothing for a configuration without a model, and for a copy of one with decisions. Raises as `decide`.
    """
    if config.model_config is None or KEY in config.additional_config:
        return {}
    decisions, asked = decide(config, family), _switches(config)
    parts = {name: name in asked for name, part in decisions.items() if part.on}
    if is_ours(getattr(config.speculative_config, "attention_backend", None)) and "attention" not in parts:
        raise Refusal(
            "attention_backend CUSTOM in --speculative-config asks for vllm-opset's attention for the draft model "
            f"alone: give {BACKEND_OPTION}, too."
        )
    config.additional_config = {**config.additional_config, KEY: parts}
    return decisions


def kept(config: "VllmConfig") -> Mapping[str, bool]:
    """The parts that are on for an engine, by name, and whether a user asked for each."""
    return config.additional_config.get(KEY, {})


def decide(config: "VllmConfig", family: int) -> dict[str, Decision]:
    """Whether each part is on, and why.

    family: the GPUs' compute capability, such as 90. Raises Refusal if a user asked for a part that does not support
    the configuration. Raises OverrideError for a setting that is not valid.
    """
    chosen = _switches(config)
    for name, switch in chosen.items():
        if switch.on:
            _check_support(name, config, family)
    return {name: _decide(name, chosen.get(name), family, config) for name in PARTS}


def decide_without_model(family: int) -> dict[str, Decision]:
    """The result of `decide` by variables and files alone, for a model and configuration that all parts support."""
    chosen = switches.read({})
    return {name: _decide(name, chosen.get(name), family) for name in PARTS}


def is_wanted(name: str, kind: str, config: "VllmConfig", family: int) -> bool:
    """Whether a part that is on serves a kind: if a user asked for the part, or evidence of the kind says so."""
    found = evidence.of_kind(name, kind, family)
    return kept(config)[name] or (found is not None and found.on)


def _switches(config: "VllmConfig") -> dict[str, Switch]:
    """The user's switch of each part that has one. Raises Refusal if two of attention contradict each other."""
    chosen = switches.read(config.additional_config)
    if is_ours(config.attention_config.backend):
        switch = chosen.setdefault("attention", Switch(True, BACKEND_OPTION))
        if not switch.on:
            raise Refusal(f"{BACKEND_OPTION} asks for vllm-opset's attention, and {switch.source} switches it off.")
    return chosen


def _check_support(name: str, config: "VllmConfig", family: int) -> None:
    """Raise Refusal if a part does not support the GPUs or the configuration."""
    if divmod(family, 10) < device.OLDEST:
        raise Refusal(f"vllm-opset's {name} needs {device.NEEDED}: switch it off.")
    if rule := _first(RULES[name].unsupported, config):
        raise rule.refusal(f"({name}) {WHERE}")


def _decide(name: str, switch: Switch | None, family: int, config: "VllmConfig | None" = None) -> Decision:
    """The decision on a part: the user's, or that by default. config: see `_by_default`."""
    if switch is None:
        return _by_default(name, family, config)
    return Decision(switch.on, f"{'asked for' if switch.on else 'switched off'} by {switch.source}")


def _by_default(name: str, family: int, config: "VllmConfig | None") -> Decision:
    """Whether a part is on if no user sets it: if it was measured to be faster, and none of its rules says otherwise.

    config: None if only what depends on no model and no configuration is to be known.
    """
    row, rules = evidence.defaults().get(f"sm{family}", {}), RULES[name]
    if not row.get(name):
        return Decision(False, f"not measured to be faster on GPUs of compute capability {family // 10}.{family % 10}")
    if config and (why_not := _first(rules.unsupported, config)):
        return Decision(False, f"vLLM's own serves {why_not.feature}")
    for kind in (kind for kind in rules.kinds if config and kind.applies(config)):
        found = evidence.of_kind(name, kind.feature, family)
        if found is None or not found.on:
            return Decision(False, f"vLLM's own serves {kind.feature}: {found.summary if found else 'not measured'}")
    return Decision(True, f"faster by {row[name]}")


def _first(rules: tuple[Rule, ...], config: "VllmConfig") -> Rule | None:
    return next((rule for rule in rules if rule.applies(config)), None)
