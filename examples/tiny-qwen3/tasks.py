"""The tasks tiny-qwen3 is trained and graded on: made by a generator, split by a hash, graded by exact match.

A task has a `kind`, a `question` (`reverse: abc`), a `request` (the same in words) and an `answer`.
It reaches the model in one of two forms:

- completion: `reverse: abc =`, to which the model adds ` cba` and the end of sequence;
- chat: one user turn that holds the question or the request, answered in one assistant turn.

Whether a task is held out depends on the hash of its question alone, so a held-out one is trained on in no form.
This file imports nothing but the standard library.
"""

import hashlib
import random
import string
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Task:
    kind: str
    question: str
    request: str
    answer: str

    @property
    def completion_prompt(self) -> str:
        return f"{self.question} ="


def number(rng: random.Random) -> int:
    """A number whose count of digits is drawn first, so that short ones are not rare."""
    return rng.randrange(10 ** rng.randint(1, 3))


def word(rng: random.Random, shortest: int, longest: int, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))


def add(rng: random.Random) -> Task:
    a, b = rng.randrange(100), rng.randrange(100)
    return Task("add", f"add: {a} + {b}", f"What is {a} + {b}?", str(a + b))


def subtract(rng: random.Random) -> Task:
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    return Task("subtract", f"subtract: {a} - {b}", f"What is {a} - {b}?", str(a - b))


def largest(rng: random.Random) -> Task:
    numbers = [number(rng) for _ in range(rng.randint(2, 4))]
    listed = " ".join(map(str, numbers))
    return Task("largest", f"largest: {listed}", f"Which is the largest of {listed}?", str(max(numbers)))


def count_up(rng: random.Random) -> Task:
    first, steps = rng.randrange(200), rng.randint(2, 9)
    numbers = range(first, first + steps + 1)
    ends = f"{numbers[0]} to {numbers[-1]}"
    return Task("count_up", f"count: {ends}", f"Count from {ends}.", " ".join(map(str, numbers)))


def reverse(rng: random.Random) -> Task:
    text = word(rng, 2, 10)
    return Task("reverse", f"reverse: {text}", f"Write {text} backwards.", text[::-1])


def copy(rng: random.Random) -> Task:
    text = word(rng, 3, 24, string.ascii_lowercase + string.digits)
    return Task("copy", f"copy: {text}", f"Say {text} again.", text)


def upper(rng: random.Random) -> Task:
    text = word(rng, 2, 20)
    return Task("upper", f"upper: {text}", f"Write {text} in capitals.", text.upper())


def sort(rng: random.Random) -> Task:
    text = word(rng, 3, 6, string.digits)
    return Task("sort", f"sort: {text}", f"Sort the digits of {text}.", "".join(sorted(text)))


def repeat(rng: random.Random) -> Task:
    text, times = word(rng, 2, 6), rng.randint(2, 5)
    return Task("repeat", f"repeat: {text} {times}", f"Say {text} {times} times.", " ".join([text] * times))


KINDS: dict[str, Callable[[random.Random], Task]] = {
    make.__name__: make for make in (add, subtract, largest, count_up, reverse, copy, upper, sort, repeat)
}


def is_held_out(task: Task) -> bool:
    digest = hashlib.sha256(task.question.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random, kind: str, held_out: bool) -> Task:
    """A task of that kind, from the held-out questions or from all the others."""
    while is_held_out(task := KINDS[kind](rng)) != held_out:
        pass
    return task


def grade(answer: str, output: str) -> bool:
    """Exact match, but for white space around the output (a completion begins with the space after `=`)."""
    return output.strip() == answer
