"""Unquantised experts that are not as large as config.json says are named, and no part of gpt-oss is loaded again."""

import models
import pytest
import torch
from engines import generate, tokens
from quantised_answers import damaged

pytestmark = [pytest.mark.engine, pytest.mark.window]
FP8 = {"dtype": "bfloat16", "quantization": "fp8"}
EXPERT, MIXTRAL, GRANITE = "mlp.experts.5.down_proj.weight", "block_sparse_moe.experts.5", "block_sparse_moe"


def _half(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return tensor.narrow(dimension, 0, tensor.shape[dimension] // 2)


def _twice(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    return torch.cat([tensor, tensor], dimension)


@pytest.mark.parametrize(
    ("model", "arguments", "tensor", "resize", "dimension", "said"),
    [
        ("qwen3_moe", {}, EXPERT, _half, 1, r"w2_weight \(w2 of expert 5\) cannot be loaded"),
        ("qwen3_moe", FP8, EXPERT, _half, 0, r"w2_weight \(w2 of expert 5\) cannot be loaded"),
        ("glm4_moe", {}, EXPERT, _twice, 1, r"w2_weight \(w2 of expert 5\) cannot be loaded"),
        ("mixtral", FP8, f"{MIXTRAL}.w1.weight", _half, 0, r"w13_weight \(w1 of expert 5\) cannot be loaded"),
        ("mixtral", {}, f"{MIXTRAL}.w3.weight", _half, 1, r"w13_weight \(w3 of expert 5\) cannot be loaded"),
        ("granitemoe", {}, f"{GRANITE}.input_linear.weight", _half, 1, r"w13_weight .* cannot be loaded"),
        ("granitemoe", FP8, f"{GRANITE}.output_linear.weight", _half, 2, r"w2_weight .* cannot be loaded"),
        ("granitemoe", {}, f"{GRANITE}.output_linear.weight", _half, 0, r"w2_weight \(w2 of expert 4, .* is missing"),
        (
            "granitemoe",
            {},
            f"{GRANITE}.output_linear.weight",
            _twice,
            0,
            r"expert 8\) cannot be|experts\.8\.w2\.weight",
        ),
        ("gpt_oss", {}, "mlp.experts.gate_up_proj", _twice, 2, r"w13_weight \(gate_up_proj in .* cannot be loaded"),
        ("gpt_oss", {}, "mlp.experts.down_proj", _twice, 0, r"w2_weight \(down_proj in .* cannot be loaded"),
        ("gpt_oss", {}, "mlp.experts.down_proj_bias", _twice, 0, r"w2_bias \(down_proj_bias in .* cannot be loaded"),
    ],
)
def test_a_tensor_of_another_size_is_named(model, arguments, tensor, resize, dimension, said, engine, tmp_path):
    def change(weights: dict[str, torch.Tensor], name: str) -> None:
        weights[name] = resize(weights[name], dimension).contiguous()

    models.build(model, tmp_path / "right")
    folder = damaged(tmp_path / "right", change, f"model.layers.1.{tensor}", tmp_path / "damaged")
    with pytest.raises(Exception, match=said), engine(folder, **arguments):
        pass


def test_gpt_oss_is_not_loaded_again_in_part(engine, tmp_path):
    """vLLM would load everything but the experts, without an error."""
    for seed in (0, 1):
        models.build("gpt_oss", tmp_path / str(seed), seed)
    with engine(tmp_path / "0") as llm:
        before = tokens(generate(llm, models.prompts()))
        for method, arguments in (
            ("reload_weights", {"weights_path": str(tmp_path / "1")}),
            ("start_weight_update", {}),
        ):
            with pytest.raises(
                Exception, match=r"not support loading gpt-oss's weights again, .* old experts.*: start"
            ):
                llm.collective_rpc(method, kwargs=arguments)
        llm.reset_prefix_cache()
        assert tokens(generate(llm, models.prompts())) == before
