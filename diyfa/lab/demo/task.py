"""A task with a right answer: the model sorts eight letters, which it can do only by attending to all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from diyfa.lab.demo.model import GPT, Attention, GPTConfig
from diyfa.lab.demo.train import Preset, Trainer, learning_rate

LETTERS = 8
SIZES = GPTConfig(2, 4, 32, 2 * LETTERS)
STEPS, BATCH, QUESTIONS = 200, 64, 8
IGNORED = -100  # the target that F.cross_entropy ignores: the model need not predict the question


@dataclass(frozen=True)
class Answer:
    """A question and its answer. Training sees 12,800 of 63 billion questions, so it has not seen this one."""

    question: str
    answer: str
    expected: str

    @property
    def is_right(self) -> bool:
        return self.answer == self.expected


def _examples(count: int, generator: torch.Generator) -> torch.Tensor:
    """Return (count, 2·LETTERS + 1) bytes: different letters in any order, ">", the same letters sorted."""
    letters = ord("a") + torch.rand(count, 26, generator=generator, device="cpu").argsort(-1)[:, :LETTERS]
    return torch.cat((letters, torch.full((count, 1), ord(">"), device="cpu"), letters.sort(-1).values), 1)


def _text(letters: torch.Tensor) -> str:
    return bytes(letters.tolist()).decode(errors="replace")


def train(
    device: torch.device,
    preset: Preset,
    seed: int,
    attention: Attention,
    steps: int = STEPS,
    advance: Callable[[], None] = lambda: None,
) -> GPT:
    """Return a model trained with `attention`; `advance` is called after every step."""
    torch.manual_seed(seed)
    preset = replace(preset, model=SIZES, batch=BATCH, steps=steps, learning_rate=3e-3)
    trainer = Trainer(GPT(SIZES, attention).to(device), preset, device)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        examples = _examples(BATCH, generator).to(device)
        targets = examples[:, 1:].clone()
        targets[:, :LETTERS] = IGNORED
        trainer.step(examples[:, :-1], targets, learning_rate(step, preset, steps))
        advance()
    return trainer.model


@torch.no_grad()
def ask(model: GPT, device: torch.device, seed: int) -> list[Answer]:
    """Return questions with the model's answers, the likeliest letter at each position."""
    examples = _examples(QUESTIONS, torch.Generator().manual_seed(seed + 1))
    tokens = examples[:, : LETTERS + 1].to(device)
    for _ in range(LETTERS):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
    triples = zip(examples[:, :LETTERS], tokens.cpu()[:, LETTERS + 1 :], examples[:, LETTERS + 1 :], strict=True)
    return [Answer(_text(question), _text(answer), _text(expected)) for question, answer, expected in triples]
