"""Train tiny-qwen3 from nothing, on generated tasks, and save it beside this file.

    python train.py            # the whole run: model, tokenizer, chat template, generation config, heldout.jsonl
    python train.py --check    # grade what is saved on heldout.jsonl, with transformers' generate, in fp32 and bf16

Every row of a batch is a stream of solved tasks, so each answer is learnt with none, some or many tasks before it.
The loss is on the answers and their ends alone: the rest is random and cannot be predicted.
"""

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path

import torch
from tasks import KINDS, Task, draw, grade
from tokenizer import TURN_END, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SEED = 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 4000
WARMUP_STEPS = 50
DECAY_FROM = 0.3  # the share of the run after which the learning rates fall linearly to nothing
MAX_LENGTH = 2048
SHORT_ROWS, LONG_ROWS = (32, 128), (2, MAX_LENGTH)  # rows, tokens
LONG_EVERY = 8
MUON_LR, ADAM_LR = 0.02, 3e-3
HELD_OUT_PER_KIND = 40
IGNORED = -100  # the label transformers leaves out of the loss

# Numbers need the most examples: their answers are short, and they take more than moving characters.
WEIGHTS = {kind: 1 for kind in KINDS} | {"add": 6, "subtract": 6, "largest": 4, "reverse": 2, "copy": 2}

SYSTEM_SENTENCES = (
    "You answer with the result alone.",
    "You are a careful assistant.",
    "Numbers are written in base ten.",
    "Words are made of lower-case letters.",
    "Be brief.",
    "Every question has one answer.",
)


def build_model(tokenizer) -> Qwen3ForCausalLM:
    """1.6 M parameters. The vocabulary is padded to a multiple of 64."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).to(DEVICE)


def system_turn(rng: random.Random) -> list[dict]:
    if rng.random() < 0.5:
        return []
    content = " ".join(rng.choices(SYSTEM_SENTENCES, k=rng.randint(1, 4)))
    return [{"role": "system", "content": content}]


def chat_prompt(tokenizer, content: str, before: list[dict]) -> str:
    messages = [*before, {"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def stream_row(tokenizer, tasks, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Ids and labels of one row: solved tasks, all in one form, until the next no longer fits; then padding.

    After an answer the label is always the end of the turn. In the completion form the text goes on with a line break
    all the same, so that solved lines can stand before a question.
    """
    is_chat = rng.random() < 0.5
    before = system_turn(rng)
    ids: list[int] = []
    labels: list[int] = []
    while True:
        task: Task = next(tasks)
        if is_chat:
            prompt = chat_prompt(tokenizer, rng.choice((task.question, task.request)), before)
            pieces = (prompt, task.answer, TURN_END, "\n")
        else:
            pieces = (task.completion_prompt, " " + task.answer, "\n", "")
        prompt_ids, answer_ids, end_ids, gap_ids = tokenizer(list(pieces)).input_ids
        if len(ids) + len(prompt_ids) + len(answer_ids) + 2 > length:
            padding = length - len(ids)
            return ids + [tokenizer.pad_token_id] * padding, labels + [IGNORED] * padding
        ids += prompt_ids + answer_ids + end_ids + gap_ids
        labels += [IGNORED] * len(prompt_ids) + answer_ids + [tokenizer.eos_token_id] + [IGNORED] * len(gap_ids)
        before = []


def batches(tokenizer, rng: random.Random):
    """Endless (ids, labels), each [rows, tokens] int64: short rows, and now and then long ones."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    tasks = (draw(rng, rng.choices(kinds, weights)[0], held_out=False) for _ in iter(int, 1))
    step = 0
    while True:
        step += 1
        rows, length = LONG_ROWS if step % LONG_EVERY == 0 else SHORT_ROWS
        ids, labels = zip(*(stream_row(tokenizer, tasks, length, rng) for _ in range(rows)), strict=True)
        yield torch.tensor(ids), torch.tensor(labels)


def build_optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def learning_rate_scale(step: int) -> float:
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, (STEPS - step) / (STEPS * (1 - DECAY_FROM)))


def held_out_tasks() -> list[Task]:
    """The same number of every kind, no question twice."""
    rng = random.Random(SEED)
    tasks: list[Task] = []
    for kind in KINDS:
        chosen: dict[str, Task] = {}
        while len(chosen) < HELD_OUT_PER_KIND:
            task = draw(rng, kind, held_out=True)
            chosen[task.question] = task
        tasks += chosen.values()
    return tasks


def write_held_out(path: Path) -> list[dict]:
    """One line per question: both prompts and the answer. Chat turns alternate between question and request."""
    lines = []
    for i, task in enumerate(held_out_tasks()):
        content = task.question if i % 2 else task.request
        lines.append(
            {
                "kind": task.kind,
                "completion": task.completion_prompt,
                "messages": [{"role": "user", "content": content}],
                "answer": task.answer,
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


@torch.inference_mode()
def exact_match(model, tokenizer, lines: list[dict]) -> dict[str, float]:
    """Share of right answers by form and kind, by greedy `generate`, one batch per form with padding on the left."""
    right, asked = Counter(), Counter()
    for form in ("completion", "chat"):
        for start in range(0, len(lines), 100):
            part = lines[start : start + 100]
            if form == "chat":
                prompts = [chat_prompt(tokenizer, line["messages"][-1]["content"], []) for line in part]
            else:
                prompts = [line["completion"] for line in part]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
            outputs = model.generate(**inputs, max_new_tokens=64, do_sample=False)
            texts = tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
            for line, text in zip(part, texts, strict=True):
                asked[form, line["kind"]] += 1
                right[form, line["kind"]] += grade(line["answer"], text)
    return {f"{form} {kind}": right[form, kind] / n for (form, kind), n in asked.items()}


def report(scores: dict[str, float]) -> str:
    below = {name: score for name, score in scores.items() if score < 1}
    return f"exact match {sum(scores.values()) / len(scores):.4f}; below 1: {below}"


def train() -> None:
    torch.manual_seed(SEED)
    tokenizer = build_tokenizer(MAX_LENGTH)
    model = build_model(tokenizer)
    lines = write_held_out(HERE / "heldout.jsonl")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    optimizers = build_optimizers(model)
    compiled = torch.compile(model, dynamic=False)
    losses: dict[int, float] = {}
    began = time.monotonic()
    for step, (ids, labels) in zip(range(STEPS), batches(tokenizer, random.Random(SEED)), strict=False):
        ids, labels = ids.to(DEVICE), labels.to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = compiled(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in zip(optimizers, (MUON_LR, ADAM_LR), strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_scale(step)
            optimizer.step()
            optimizer.zero_grad()
        losses[len(ids)] = loss.item()
        if step % 250 == 249:
            print(f"step {step + 1} loss by rows {losses} {time.monotonic() - began:.0f} s", flush=True)
        if step % 1000 == 999:
            print(report(exact_match(model, tokenizer, lines)), flush=True)
    model.to(torch.bfloat16).save_pretrained(HERE)
    # A new one: `exact_match` leaves its padding in the tokenizer it was given, and it would be saved.
    build_tokenizer(MAX_LENGTH).save_pretrained(HERE)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
    GenerationConfig(**generation).save_pretrained(HERE)


def check() -> None:
    tokenizer = AutoTokenizer.from_pretrained(HERE)
    lines = [json.loads(line) for line in (HERE / "heldout.jsonl").read_text().splitlines()]
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(HERE, dtype=dtype).to(DEVICE)
        scores = exact_match(model, tokenizer, lines)
        print(f"{dtype}: {report(scores)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="grade the saved model instead of training one")
    if not parser.parse_args().check:
        train()
    check()
