"""`diyfa demo`: see in two minutes that diyfa works.

It trains with diyfa's attention, compares losses, speed and memory with PyTorch's, writes text, and sorts letters, a
task in which every answer is right or wrong.
"""

from __future__ import annotations

import importlib.util
import math
import time
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diyfa import flash_attention
from diyfa.cli.devices import device_for
from diyfa.cli.output import err, out, print_json, progress_bar
from diyfa.lab.demo import task as demo_task
from diyfa.lab.demo.train import EARLY_STEPS, PRESETS, Comparison, Preset, attention_memory, compare

ROWS = 8
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*#@"


def _curve(losses: list[float]) -> str:
    """Return `losses` as bars, averaged into at most 56 columns."""
    columns = min(56, len(losses))
    edges = [round(i * len(losses) / columns) for i in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    bars = ASCII_BARS if out.options.ascii_only else BARS
    return "".join(bars[round((m - low) / span * (len(bars) - 1))] for m in means)


def _loss_table(result: Comparison, steps: int) -> Table:
    table = Table(title="loss (nats per byte)", title_justify="left")
    for heading in ("step", "diyfa", "PyTorch SDPA", "relative difference"):
        table.add_column(heading, justify="right")
    for step in sorted({round(i * (steps - 1) / (ROWS - 1)) for i in range(ROWS)}):
        a, b = result.diyfa[step], result.sdpa[step]
        table.add_row(str(step + 1), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b) / b:.1e}")
    return table


def _cost_table(result: Comparison, preset: Preset, alone: dict[str, float]) -> Table:
    """Return speed and memory of both models, and the memory of attention alone, beside one that stores the scores."""
    table = Table(title="speed and memory", title_justify="left")
    for heading in ("", "diyfa", "PyTorch SDPA", "scores stored"):
        table.add_column(heading, justify="right" if heading else "left")
    speed, step = result.tokens_per_second(preset), result.step_mib
    table.add_row("training, tokens/s", f"{speed['diyfa']:,.0f}", f"{speed['sdpa']:,.0f}", "")
    table.add_row("a training step, MiB", f"{step['diyfa']:.1f}", f"{step['sdpa']:.1f}", "")
    table.add_row(f"attention, {preset.long_context} tokens, MiB", *(f"{mib:.1f}" for mib in alone.values()))
    return table


def _print_answers(answers: list[demo_task.Answer], steps: int, seconds: float) -> None:
    """Print the questions, the answers and how many are right. A reader can check them by eye."""
    right = sum(each.is_right for each in answers)
    out.print(
        f"\nA third model, with diyfa's attention, learned in {steps} steps ({seconds:.0f} s) to sort "
        f"{demo_task.LETTERS} letters. Asked what it has not seen:",
        highlight=False,
    )
    mark, cross = ("ok", "wrong") if out.options.ascii_only else ("✓", "✗")
    for each in answers:
        verdict = f"[green]{mark}[/]" if each.is_right else f"[red]{cross} {each.expected}[/]"
        out.print(f"  {each.question} > {escape(each.answer)} {verdict}", highlight=False)
    style = "bold green" if right == len(answers) else "bold yellow"
    out.print(f"{right} of {len(answers)} right.", style=style, highlight=False)


def _plot(result: Comparison, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(result.diyfa) + 1)
    top.plot(steps, result.sdpa, label="PyTorch SDPA", linewidth=3, alpha=0.4)
    top.plot(steps, result.diyfa, label="diyfa", linewidth=1)
    top.set_ylabel("loss (nats per byte)")
    top.legend()
    differences = [abs(a - b) / b for a, b in zip(result.diyfa, result.sdpa, strict=True)]
    bottom.semilogy(steps, [max(d, 1e-9) for d in differences], linewidth=0.8)
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _print_losses(result: Comparison, steps: int, seconds: float) -> None:
    out.print(_loss_table(result, steps))
    out.print(f"diyfa         {_curve(result.diyfa)}", highlight=False)
    out.print(f"PyTorch SDPA  {_curve(result.sdpa)}", highlight=False)
    held_out = ", ".join(f"{who} {loss:.4f}" for who, loss in result.held_out.items())
    out.print(f"held-out loss: {held_out}; training took {seconds:.1f} s", highlight=False)


def run(
    backend: str | None, steps: int | None, seed: int, prompt: str, length: int, plot: Path | None, json: bool
) -> int:
    """Train, compare, generate, print. Return 0 if the two loss curves agree within the preset's bounds, else 1."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is needed: pip install 'diyfa[plot]'", param_hint="--plot")
    device, name = device_for(backend)
    preset = PRESETS.get(device.type, PRESETS["cpu"])
    steps = steps or preset.steps
    sizes = preset.model
    precision = str(preset.autocast or torch.float32).removeprefix("torch.")
    if not json:
        out.print(
            f"Two byte-level GPTs ({sizes.layers} layers, {sizes.heads} heads of {sizes.head_dim}, context "
            f"{sizes.context}, {precision}) read the Python standard library on {device.type}: same weights, "
            f"same batches. One uses diyfa's attention (backend {name}), the other PyTorch's.",
            highlight=False,
        )
    start = time.perf_counter()
    result = Comparison()
    with progress_bar(not json) as progress:
        task = progress.add_task("training", total=steps, note="")
        for result in compare(device, preset, steps, seed, name):
            note = f"loss {result.diyfa[-1]:.4f} / {result.sdpa[-1]:.4f}"
            progress.update(task, advance=1, note=note)
        trained = time.perf_counter()
        task_steps = min(steps, demo_task.STEPS)
        task = progress.add_task("learning to sort", total=task_steps, note="")
        attention = partial(flash_attention, causal=True, backend=name)
        advance = partial(progress.update, task, advance=1)
        sorter = demo_task.train(device, preset, seed, attention, task_steps, advance)
        answers = demo_task.ask(sorter, device, seed)
    sorted_at = time.perf_counter()
    alone = attention_memory(device, preset, name)
    assert result.model is not None
    text = result.model.generate(prompt.encode(), length, seed) if length else b""
    finished = time.perf_counter()
    early, difference = result.max_relative_difference(EARLY_STEPS), result.max_relative_difference()
    agree = result.agrees(preset)
    if plot is not None:
        _plot(result, plot)
    if json:
        document: dict[str, Any] = {
            "device": device.type,
            "backend": name,
            "steps": steps,
            "seed": seed,
            "loss": {"diyfa": result.diyfa, "sdpa": result.sdpa},
            "held_out_loss": result.held_out,
            "max_relative_difference": difference if math.isfinite(difference) else None,
            "bound": preset.bound,
            "early_steps": EARLY_STEPS,
            "early_max_relative_difference": early if math.isfinite(early) else None,
            "early_bound": preset.early_bound,
            "agree": agree,
            "tokens_per_second": result.tokens_per_second(preset),
            "step_mib": result.step_mib,
            "attention_mib": {"tokens": preset.long_context, **alone},
            "text": text.decode(errors="replace"),
            "sorted": [{**asdict(each), "right": each.is_right} for each in answers],
            "seconds": {
                "training": trained - start,
                "sorting": sorted_at - trained,
                "generation": finished - sorted_at,
            },
        }
        print_json(document)
        return 0 if agree else 1
    _print_losses(result, steps, trained - start)
    out.print(_cost_table(result, preset, alone))
    if device.type == "cpu":
        out.print("diyfa's CPU backend is there to be read and tested; its kernels for GPUs and NPUs are fast.")
    if length:
        out.print(Panel(Text(text.decode(errors="replace")), title="written by the diyfa model"))
    if plot is not None:
        out.print(f"loss curves: {plot}", highlight=False)
    verdict = (
        f"largest relative difference {early:.1e} in the first {EARLY_STEPS} steps (bound {preset.early_bound:.0e}), "
        f"{difference:.1e} in all (bound {preset.bound:.0e})"
    )
    if agree:
        out.print(f"The two curves agree: {verdict}.", style="bold green", highlight=False)
    else:
        err.print(f"The two curves differ: {verdict}.", style="bold red", highlight=False)
    _print_answers(answers, task_steps, sorted_at - trained)
    return 0 if agree else 1
