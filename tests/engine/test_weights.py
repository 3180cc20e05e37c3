"""Weights that are loaded again, and weights that are gone because a kernel has packed them."""

import models
import pytest
import torch
from engines import generate, tokens

pytestmark = [pytest.mark.engine, pytest.mark.window]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """Folders with random Qwen3 models of one shape, with tied embeddings."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    for seed, folder in enumerate(folders):
        models.build("qwen3", folder, seed=seed, tie_word_embeddings=True)
    return folders


def answers(llm) -> list[list[int]]:
    return tokens(generate(llm, models.prompts(), max_tokens=16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_loaded_again_are_those_that_serve(dtype, two_models, engine):
    one, other = two_models
    with engine(other, dtype=dtype) as llm:
        expected = answers(llm)
    with engine(one, dtype=dtype) as llm:
        assert answers(llm) != expected
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()
        assert answers(llm) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="weights are packed on a CPU: runs where there is no GPU")
def test_weights_that_are_gone_are_not_saved(two_models, engine, tmp_path):
    with engine(two_models[0], dtype="bfloat16") as llm, pytest.raises(Exception, match="packed this model's weights"):
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(tmp_path)})
