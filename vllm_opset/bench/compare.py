"""A comparison of whole engines on the same prompts, by turns or apart. Each engine has its own processes."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm_opset.bench.cases import Case, Request
from vllm_opset.bench.engines import Answer, Engine, EngineError, RunningEngine, Started
from vllm_opset.bench.figures import Run, latencies
from vllm_opset.bench.shapes import Shape, with_draft

# vLLM does not start if less than this share of the device's memory is free. After that, its memory depends on the
# model and on the size of the KV cache, which is given. The engines that already run have allocated theirs.
FREE_SHARE = 0.1
# The variables for the folders in which vLLM, torch, Triton, CUDA and opset's C++ kernels cache compiled code.
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "OPSET_CACHE")

# A run that compiled kernels is repeated, up to so many runs in all, since its time is the compiler's.
ATTEMPTS = 3

# By engine, for each repetition: the answers to the rounds of the case.
Answers = dict[str, list[list[Answer]]]


@dataclass(frozen=True)
class EngineResult:
    """One engine in one case. first: the uncounted run. same: number of requests with the first engine's tokens."""

    case: Case
    engine: str
    first: Run
    runs: list[Run]
    same: int | None


@dataclass(frozen=True)
class Comparison:
    """The results of all engines. started, peak_bytes: by engine. In every case the first engine's result comes first.

    If an engine ended or the comparison was interrupted, it has only the runs that all engines had done. failure: of
    the engine.
    """

    engines: list[Engine]
    started: dict[str, Started]
    peak_bytes: dict[str, int]
    results: list[EngineResult]
    failure: EngineError | None = None

    def as_json(self) -> dict:
        """Plain data; times are in seconds unless the name says otherwise."""
        return {
            "engines": [
                {"name": engine.name, "args": dict(engine.args), "env": dict(engine.env)}
                | asdict(self.started[engine.name])
                | {"peak_bytes": self.peak_bytes[engine.name]}
                for engine in self.engines
            ],
            "results": [
                {"case_name": result.case.name, **asdict(result), "metrics": result.case.metrics(result.runs)}
                for result in self.results
            ],
        }


@dataclass(frozen=True)
class ComparisonPlan:
    """The plan of a comparison.

    cold: each engine starts with empty caches, which are deleted afterwards. apart: only one engine runs at a time.
    at_once: all engines start at the same time. Starts are then slower, and all of them sooner done.
    """

    shape: Shape
    cases: Sequence[Case]
    engines: Sequence[Engine]
    repetitions: int
    cold: bool
    apart: bool = False
    at_once: bool = False

    @property
    def steps(self) -> int:
        """The number of calls of `progress` in `run`."""
        return len(self.engines) * (1 + len(self.cases) * (1 + self.repetitions))

    def run(self, folder: Path, logs: Path, progress: Callable[[str], None]) -> Comparison:
        """Run the comparison. folder: for temporary files. progress: is called before each step.

        If an engine ends, or the comparison is interrupted or terminated, it returns the runs that every engine has
        done, of each case. If there is none, it raises EngineError, KeyboardInterrupt or SystemExit.
        """
        (folder / "config.json").write_text(json.dumps(self.shape.config))
        started: dict[str, Started] = {}
        answers: dict[str, Answers] = {case.name: {} for case in self.cases}
        failure = None
        try:
            for engines in [[engine] for engine in self.engines] if self.apart else [self.engines]:
                with ExitStack() as stack:
                    made = [self._engine(engine, folder, logs) for engine in engines]
                    running = _start(made, len(made) if self.at_once else 1, stack, progress)
                    started |= {one.engine.name: one.started for one in running}
                    for case in self.cases:
                        self._ask(case, running, answers[case.name], progress)
        except (KeyboardInterrupt, SystemExit, EngineError) as error:
            if not self._done(answers):
                raise
            failure = error if isinstance(error, EngineError) else None
        done = self._done(answers)
        peak_bytes = {name: found[-1][-1].peak_bytes for name, found in done[-1][1].items()}
        results = [result for case, of_all in done for result in _results(case, of_all)]
        return Comparison(list(self.engines), started, peak_bytes, results, failure)

    def _engine(self, engine: Engine, folder: Path, logs: Path) -> RunningEngine:
        env = {name: str(folder / "caches" / engine.name / name) for name in CACHES if self.cold}
        drafting = replace(engine, args=with_draft(engine.args, folder))
        return RunningEngine(drafting, self.engine_args(folder), logs, env)

    def _done(self, answers: Mapping[str, Answers]) -> list[tuple[Case, Answers]]:
        """The cases in which every engine has a run that counts, with the answers of the runs that all engines have."""
        done = []
        for case in self.cases:
            found = answers[case.name]
            runs = min(len(found.get(engine.name, ())) for engine in self.engines)
            if runs > 1:
                done.append((case, {name: of_one[:runs] for name, of_one in found.items()}))
        return done

    def engine_args(self, folder: Path) -> dict:
        """The arguments of every engine, which its own arguments override. folder: contains a config.json."""
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

    def _ask(
        self, case: Case, running: Sequence[RunningEngine], answers: Answers, progress: Callable[[str], None]
    ) -> None:
        """Add the answers of these engines to `answers`. The engines run by turns if there are several."""
        rounds = case.rounds(self.shape.text_config["vocab_size"])
        answers |= {one.engine.name: [] for one in running}
        for repetition in range(1 + self.repetitions):
            # The order alternates, so that drift of the machine affects all engines alike.
            for one in running if repetition % 2 == 0 else reversed(running):
                progress(f"{case.name}, run {repetition} of {self.repetitions}: {one.engine.name}")
                answers[one.engine.name].append(_answers(one, rounds, ATTEMPTS if repetition else 1))


def _start(
    made: Sequence[RunningEngine], at_a_time: int, stack: ExitStack, progress: Callable[[str], None]
) -> list[RunningEngine]:
    """Starts engines, some at a time, which end with the stack. If one fails, no other one is waited for."""

    def start(one: RunningEngine) -> RunningEngine:
        progress(f"starting {one.engine.name}")
        return stack.enter_context(one)

    with ThreadPoolExecutor(at_a_time) as pool:
        starts = [pool.submit(start, one) for one in made]
        try:
            for ended in as_completed(starts):
                ended.result()
            return [ended.result() for ended in starts]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for one in made:
                one.interrupt()
            raise


def _answers(running: RunningEngine, rounds: Sequence[Sequence[Request]], attempts: int) -> list[Answer]:
    """The answers to the rounds of the first attempt that compiled no kernel, or of the last attempt."""
    for _ in range(attempts):
        with running.awake():
            answers = [running.ask(requests) for requests in rounds]
        if not any(answer.compiled for answer in answers):
            break
    return answers


def _results(case: Case, answers: Answers) -> Iterator[EngineResult]:
    """The result of each engine in one case."""
    expected = next(iter(answers.values()))[0][-1].tokens
    for name, found in answers.items():
        first, *runs = map(_run, found)
        same = sum(map(list.__eq__, found[0][-1].tokens, expected)) if case.is_greedy else None
        yield EngineResult(case, name, first, runs, same)


def _run(answers: list[Answer]) -> Run:
    """One repetition, from the answers to its rounds."""
    _, *begun, complete = answers
    compiled = [kernel for answer in answers for kernel in answer.compiled]
    waits = {} if complete.times is None else latencies(complete.tokens, complete.times)
    return Run(begun[0].seconds if begun else None, complete.seconds, compiled, complete.steps, waits)
