"""Whole engines beside each other: the same prompts, by turns or apart, each engine in processes of its own."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_opset.bench.engines import GREEDY, Answer, Engine, RunningEngine, Started
from vllm_opset.bench.shapes import Case, Shape

# vLLM does not start where less than this share of the device is free. What it then takes follows from the model and
# from the size of the KV cache, which is given; the engines that are up already have their parts.
FREE_SHARE = 0.1
# Where vLLM, torch, Triton, CUDA and opset's C++ kernels keep what they have compiled.
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "OPSET_CACHE")

# Of each engine, for each repetition: one token for one prompt, one for all, and all tokens.
Answers = dict[str, list[list[Answer]]]


@dataclass(frozen=True)
class Run:
    """One repetition. ttft: seconds until every request has one token. total: until all tokens are there.

    compiled: the Triton kernels that were compiled, or loaded from Triton's cache, meanwhile.
    """

    ttft: float
    total: float
    compiled: list[str]


@dataclass(frozen=True)
class Result:
    """One engine in one case. first: the run before those that count. same: requests with the first engine's tokens."""

    case: Case
    engine: str
    first: Run
    runs: list[Run]
    same: int | None

    def metrics(self) -> dict[str, list[float]]:
        """Of each run: seconds to the first token, milliseconds for each further one, output tokens per second."""
        case = self.case
        return {
            "TTFT, s": [run.ttft for run in self.runs],
            "TPOT, ms": [1e3 * (run.total - run.ttft) / (case.output - 1) for run in self.runs],
            "output tokens/s": [case.batch * case.output / run.total for run in self.runs],
        }


@dataclass(frozen=True)
class Comparison:
    """started, peak_bytes: by engine. In every case the first engine's result comes first.

    Of a comparison that was interrupted, it has the cases that were done.
    """

    engines: list[Engine]
    started: dict[str, Started]
    peak_bytes: dict[str, int]
    results: list[Result]

    def as_json(self) -> dict:
        """Plain data; times in seconds where nothing else is said."""
        return {
            "engines": [
                {"name": engine.name, "args": dict(engine.args), "env": dict(engine.env)}
                | asdict(self.started[engine.name])
                | {"peak_bytes": self.peak_bytes[engine.name]}
                for engine in self.engines
            ],
            "results": [
                {"case_name": result.case.name, **asdict(result), "metrics": result.metrics()}
                for result in self.results
            ],
        }


@dataclass(frozen=True)
class Plan:
    """What is to be compared.

    cold: each engine starts with empty caches, which are dropped afterwards. apart: one engine is up at a time.
    """

    shape: Shape
    cases: Sequence[Case]
    engines: Sequence[Engine]
    repetitions: int
    cold: bool
    apart: bool = False

    @property
    def steps(self) -> int:
        """As often as `run` tells of its progress."""
        return len(self.engines) * (1 + len(self.cases) * (1 + self.repetitions))

    def run(self, folder: Path, logs: Path, progress: Callable[[str], None]) -> Comparison:
        """folder: for what is gone afterwards. progress: told what is done before each step. Raises EngineError.

        If it is interrupted, or told to exit, once every engine has answered a case, it returns what is there.
        """
        (folder / "config.json").write_text(json.dumps(self.shape.config))
        started: dict[str, Started] = {}
        answers: dict[str, Answers] = {case.name: {} for case in self.cases}
        try:
            for engines in [[engine] for engine in self.engines] if self.apart else [self.engines]:
                with ExitStack() as stack:
                    running = []
                    for engine in engines:
                        progress(f"starting {engine.name}")
                        running.append(stack.enter_context(self._start(engine, folder, logs)))
                        started[engine.name] = running[-1].started
                    for case in self.cases:
                        answers[case.name] |= self._ask(case, running, progress)
        except (KeyboardInterrupt, SystemExit):
            if not self._done(answers):
                raise
        done = self._done(answers)
        peak_bytes = {name: found[-1][-1].peak_bytes for name, found in answers[done[-1].name].items()}
        results = [result for case in done for result in _results(case, answers[case.name])]
        return Comparison(list(self.engines), started, peak_bytes, results)

    def _start(self, engine: Engine, folder: Path, logs: Path) -> RunningEngine:
        env = {name: str(folder / "caches" / engine.name / name) for name in CACHES if self.cold}
        return RunningEngine(engine, self.engine_args(folder), logs, env)

    def _done(self, answers: Mapping[str, Answers]) -> list[Case]:
        """The cases that every engine has answered."""
        return [case for case in self.cases if len(answers[case.name]) == len(self.engines)]

    def engine_args(self, folder: Path) -> dict:
        """Of every engine, if it has no others. folder: with a config.json."""
        return {
            "model": str(folder),
            "dtype": self.shape.dtype,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": self.shape.max_model_len,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": self.shape.kv_cache_bytes(self.cases),
            "gpu_memory_utilization": FREE_SHARE,
            "seed": 0,
        }

    def _ask(self, case: Case, running: Sequence[RunningEngine], progress: Callable[[str], None]) -> Answers:
        """The answers of these engines, by turns if they are several."""
        prompts = case.prompts(self.shape.config["vocab_size"])
        # The first step of an engine that was stopped takes longer: one prompt goes before.
        asked = ((prompts[:1], 1), (prompts, 1), (prompts, case.output))
        answers: Answers = {one.engine.name: [] for one in running}
        for repetition in range(1 + self.repetitions):
            # Back and forth, so that what drifts meets all alike.
            for one in running if repetition % 2 == 0 else reversed(running):
                progress(f"{case.name}, run {repetition} of {self.repetitions}: {one.engine.name}")
                with one.awake():
                    answers[one.engine.name].append([one.ask(*what, {**GREEDY, **case.sampling}) for what in asked])
        return answers


def _results(case: Case, answers: Answers) -> Iterator[Result]:
    """Of each engine."""
    expected = next(iter(answers.values()))[0][-1].tokens
    for name, found in answers.items():
        first, *runs = [
            Run(begun.seconds, complete.seconds, woken.compiled + begun.compiled + complete.compiled)
            for woken, begun, complete in found
        ]
        same = None if case.sampling else sum(map(list.__eq__, found[0][-1].tokens, expected))
        yield Result(case, name, first, runs, same)
