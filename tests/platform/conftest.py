"""vLLM with the plugin, in this process."""

import json
from collections.abc import Callable

import pytest
from plugin import registered  # noqa: F401


@pytest.fixture
def configure(tmp_path, monkeypatch) -> Callable:
    """`configure(model, **arguments)`: the checks of `LLM(model, **arguments)` before it starts anything."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_opset.platform.cuda import graphs

    for name in (graphs.VARIABLE, graphs.OURS):  # a configuration may set these, and no test may leave them set
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def configure(model: dict, **arguments):
        (tmp_path / "config.json").write_text(json.dumps(model))
        return EngineArgs(str(tmp_path), skip_tokenizer_init=True, **arguments).create_engine_config()

    return configure


@pytest.fixture
def unprocessed(configure) -> Callable:
    """`unprocessed(model, **arguments)`: the same, without what the platform of this machine has set."""

    def unprocessed(model: dict, **arguments):
        made = configure(model, **arguments)
        made.parallel_config.worker_cls = "auto"
        made.compilation_config.mode = None
        if order := getattr(made.kernel_config, "ir_op_priority", None):  # vLLM removes its IR after 0.33
            vars(order).update(dict.fromkeys(vars(order)))
        return made

    return unprocessed
