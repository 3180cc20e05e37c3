"""Each bridge says which releases of vLLM need it, and expires with the last of them."""

import functools

import pytest

from vllm_opset.platform import release
from vllm_opset.platform.bridges import has, lacks, patch, takes, uses, wrap_once
from vllm_opset.platform.differences import BRIDGES

SERVED = [(release.OLDEST[0], minor) for minor in range(release.OLDEST[1], release.NEWEST[1] + 1)]

each = pytest.mark.parametrize("bridge", BRIDGES, ids=[bridge.name for bridge in BRIDGES])


@pytest.mark.window
@each
def test_the_probe_finds_what_is_said_of_this_release(bridge):
    assert bridge.needed() == bridge.is_needed_by(release.minor(release.installed()))


@each
def test_a_served_release_needs_it(bridge):
    assert any(map(bridge.is_needed_by, SERVED)), f"no release needs {bridge.name}: remove it, and {bridge.code}"
    assert bridge.first is None or bridge.first > release.OLDEST, "every release needs it: drop `first` or the entry"


@each
def test_its_code_is_there(bridge):
    assert has(bridge.code)()


def test_it_says_when_it_can_go():
    endless = [bridge.name for bridge in BRIDGES if not (bridge.hook or bridge.first or bridge.last or bridge.ends)]
    assert not endless


def test_names_are_unique():
    assert len({bridge.name for bridge in BRIDGES}) == len(BRIDGES)


@pytest.mark.parametrize(("needed", "always", "runs"), [(True, False, 1), (False, False, 0), (False, True, 1)])
def test_a_patch_that_is_not_needed_does_nothing(needed, always, runs):
    calls = []

    @patch(lambda: needed, always=always)
    def append(call: str) -> None:
        """Append a call
        to the calls.

        Parameters: call is a word.
        """
        calls.append(call)

    append("once")
    assert calls == ["once"] * runs
    assert append.bridge.reason == "Append a call to the calls."
    assert append.bridge.name == "append" and append.bridge.code.endswith(".append")


def test_probes_tell_what_is_there():
    assert has("vllm.config.VllmConfig.compute_hash")() and has("vllm.v1.worker.gpu_worker")()
    assert lacks("vllm.config.VllmConfig.no_such_field")() and lacks("vllm.no_such_module.name")()
    assert takes("json.dumps", "indent")() and not takes("json.dumps", "indents")() and not takes("json.dumped", "s")()
    assert uses("json.load", "loads")() and not uses("json.load", "dumps")() and not uses("json.loader", "loads")()


def test_a_function_is_wrapped_once_whoever_else_wraps_it():
    class Theirs:
        def count(self) -> int:
            return 1

        @staticmethod
        def fixed() -> int:
            return 1

    def more(function):
        return lambda *args: 10 + function(*args)

    Theirs.count = functools.wraps(Theirs.count)(more(Theirs.count))  # another plugin, before
    for name in ("count", "fixed"):
        for _ in range(2):
            wrap_once(Theirs, name, more)
    Theirs.count = functools.wraps(Theirs.count)(more(Theirs.count))  # and after
    wrap_once(Theirs, "count", more)
    assert (Theirs().count(), Theirs().fixed(), Theirs.fixed()) == (31, 11, 11)
