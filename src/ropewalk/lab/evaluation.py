"""What is measured of a model: losses and accuracies by length, and by distance."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ropewalk.lab.decoder import Decoder
from ropewalk.lab.run import Run
from ropewalk.lab.tasks import IGNORED, Batch, Recall, Task

__all__ = ["Curves", "evaluate", "validation_loss"]

# Name of a curve -> its points. A value is None where an encoding is not defined, or the loss not finite.
Curves = dict[str, list[tuple[float, float | None]]]

# Tokens that a model computes at once.
_TOKENS = 2**15


@torch.no_grad()
def validation_loss(model: nn.Module, task: Task, run: Run, device: torch.device) -> float:
    """The mean loss of held-out samples of the trained length."""
    losses, scored, _ = _scores(model, task.evaluation(run.evaluated, run.length), run.offset, device)
    return losses.sum().item() / scored.sum().item()


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, run: Run, device: torch.device) -> Curves:
    """Measure a trained model.

    Args:
        model: A Decoder, or a wrapper with its signature.
        task: The task of the run.
        run: The run.
        device: Device of the model.

    Returns:
        "loss by length"; for puzzles also "accuracy by length" of tokens and "exact by length" of whole answers; for
        recall "accuracy by distance". With teacher forcing an answer is exact if and only if greedy decoding finds it.
    """
    limit = next((m.encoding.length for m in model.modules() if isinstance(m, Decoder)), None)
    curves: Curves = {"loss by length": []}
    if task.solved:
        curves |= {"accuracy by length": [], "exact by length": []}
    lengths = run.lengths or (run.length,)
    for length in lengths:
        if limit is not None and task.tokens(length) > limit:
            for points in curves.values():
                points.append((length, None))
            continue
        # The same tokens at every length: the last half of the shortest one.
        batch = task.evaluation(run.evaluated, length, scored=max(1, min(lengths) // 2))
        losses, scored, right = _scores(model, batch, run.offset, device)
        loss = losses.sum().item() / scored.sum().item()
        # The largest of logits that are not finite is no answer, so it is not a wrong one either.
        finite = math.isfinite(loss)
        curves["loss by length"].append((length, loss if finite else None))
        if task.solved:
            wrong = (scored & ~right).any(1)
            accuracy = (right & scored).sum().item() / scored.sum().item()
            curves["accuracy by length"].append((length, accuracy if finite else None))
            curves["exact by length"].append((length, 1 - wrong.double().mean().item() if finite else None))
        if isinstance(task, Recall) and length == run.length:
            points = _by_distance(task, right[scored].view(len(right), -1), length)
            curves["accuracy by distance"] = [(far, share if finite else None) for far, share in points]
    return curves


def _by_distance(task: Recall, right: Tensor, length: int) -> list[tuple[float, float]]:
    """Accuracy in eight classes of the distance between a value and its first occurrence."""
    distances = torch.from_numpy(task.distances(len(right), length))
    longest, classes = 4 * length, 8
    points: list[tuple[float, float]] = []
    for index in range(classes):
        low, high = longest * index / classes, longest * (index + 1) / classes
        inside = (distances > low) & (distances <= high)
        if inside.any():
            points.append((high, right[inside].double().mean().item()))
    return points


def _scores(model: nn.Module, batch: Batch, offset: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token, which are scored, and which are right [samples, tokens], on the CPU in float64."""
    parts = [_scores_of(model, part, offset, device) for part in _parts(batch)]
    losses, right = (torch.cat(x) for x in zip(*parts, strict=True))
    return losses, batch.targets != IGNORED, right


def _scores_of(model: nn.Module, batch: Batch, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    targets = batch.targets.to(device)
    positions = offset + torch.arange(targets.shape[1], device=device) if offset else None
    logits = model(batch.inputs.to(device), positions).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return losses.cpu().double(), (logits.argmax(-1) == targets).cpu()


def _parts(batch: Batch) -> Iterator[Batch]:
    count = max(1, math.floor(_TOKENS / batch.inputs.shape[1]))
    for inputs, targets in zip(batch.inputs.split(count), batch.targets.split(count), strict=True):
        yield Batch(inputs, targets)
