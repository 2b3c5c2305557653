"""Training: it learns, resumes bit for bit, and leaves complete checkpoints whatever happens."""

import dataclasses
import json
import resource
import shutil
import threading

import pytest
import torch

import ropewalk as rw
from lab.small_runs import CPU, TINY
from ropewalk.errors import RopewalkError
from ropewalk.lab.checkpoints import last_checkpoint
from ropewalk.lab.training import Interrupted, side_by_side, train, training


def weights(model):
    return torch.cat([x.detach().flatten() for x in model.parameters()])


class StopAfter(threading.Event):
    """An event that is set when it was asked for the n-th time."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def is_set(self):
        self.calls -= 1
        return self.calls < 0


@pytest.mark.parametrize("task", ["text", "copy"])
def test_an_interrupted_run_continues_bit_for_bit(tmp_path, task):
    run = dataclasses.replace(TINY, task=task)
    whole, result = train(run, CPU)
    with pytest.raises(Interrupted, match="after step 6"):
        train(run, CPU, tmp_path, stop=StopAfter(5))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-6"]
    # What a killed run may have written after its checkpoint.
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 0.0, "seconds": 1}\n{"step": 9')
    resumed, again = train(run, CPU, tmp_path)
    assert torch.equal(weights(whole), weights(resumed))
    assert result.curves == again.curves
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-10"]
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == again.curves["loss by step"]


class Jitter(rw.Encoding):
    """An encoding with random numbers in training, which are not in a checkpoint."""

    def embed(self, x, positions=None, *, cache=None):
        return x + torch.rand(x.shape[1], 1) if self.training else x


def test_random_numbers_of_an_encoding_are_functions_of_seed_and_step(tmp_path):
    run = dataclasses.replace(TINY, encoding=f"{__name__}:Jitter", steps=6)
    torch.manual_seed(1)
    whole, _ = train(run, CPU)
    torch.manual_seed(2)
    with pytest.raises(Interrupted, match="after step 3"):
        train(run, CPU, tmp_path, stop=StopAfter(2))
    assert torch.equal(weights(whole), weights(train(run, CPU, tmp_path)[0]))
    plain, _ = train(dataclasses.replace(run, encoding="none"), CPU)
    assert not torch.equal(weights(whole), weights(plain))


def test_runs_side_by_side_are_the_same_runs(tmp_path):
    runs = [dataclasses.replace(TINY, encoding=x, seed=i, steps=5 - i) for i, x in enumerate(("rope", "t5", "learned"))]
    alone = [train(run, CPU) for run in runs]
    for count in (2, 3):
        together = side_by_side([training(run, CPU) for run in runs], CPU.device, count=count)
        for (model, result), (other, expected) in zip(together, alone, strict=True):
            assert torch.equal(weights(model), weights(other))
            assert result.curves == expected.curves
    # All that were started write a checkpoint.
    stop = StopAfter(2)
    steps = [training(run, CPU, tmp_path / str(run.seed), stop=stop) for run in runs]
    with pytest.raises(Interrupted):
        side_by_side(steps, CPU.device, count=2)
    assert [last_checkpoint(tmp_path / str(run.seed)) for run in runs] == [2, 2, 0]


def test_training_learns_and_seeds_differ():
    run = dataclasses.replace(TINY, steps=40, rate=1e-2, batch=8)
    _, result = train(run, CPU)
    losses = [loss for _, loss in result.curves["loss by step"]]
    assert None not in losses
    assert (losses[-1] or 0) < 0.75 * (losses[0] or 0)
    assert [x for x, _ in result.curves["loss by length"]] == [8, 16]
    other, again = (train(dataclasses.replace(run, seed=seed, steps=1), CPU)[1].final_loss for seed in (1, 0))
    assert other != again


def test_a_child_continues_its_parent():
    parent, result = train(TINY, CPU)
    child = dataclasses.replace(TINY, steps=0, parent=TINY)
    model, evaluated = train(child, CPU, parent=parent)
    assert torch.equal(weights(model), weights(parent))
    assert evaluated.curves["loss by length"] == result.curves["loss by length"]
    scaled = dataclasses.replace(child, encoding="rope rule=pi factor=4")
    assert train(scaled, CPU, parent=parent)[1].curves["loss by length"] != result.curves["loss by length"]


def test_a_learned_table_is_not_defined_past_its_length():
    _, result = train(dataclasses.replace(TINY, encoding="learned", steps=1), CPU)
    assert result.curves["loss by length"][0][1] is not None
    assert result.curves["loss by length"][1] == (16, None)
    with pytest.raises(RopewalkError, match="an encoding without a longest position"):
        train(dataclasses.replace(TINY, encoding="learned", offset=100), CPU)


def test_offsets_change_absolute_positions_alone():
    losses = {}
    for encoding in ("rope", "sinusoidal"):
        runs = [dataclasses.replace(TINY, encoding=encoding, steps=2, offset=offset) for offset in (0, 1000)]
        losses[encoding] = [train(run, CPU)[1].final_loss for run in runs]
    assert losses["rope"][0] == pytest.approx(losses["rope"][1], abs=1e-5)
    assert losses["sinusoidal"][0] != pytest.approx(losses["sinusoidal"][1], abs=1e-5)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    train(TINY, CPU, tmp_path)
    with pytest.raises(RopewalkError, match=r"expected: seed 0\ngot: +seed 3\n"):
        train(dataclasses.replace(TINY, seed=3), CPU, tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "missing", "no metadata", "no config"])
def test_a_broken_checkpoint_is_refused(tmp_path, damage):
    train(dataclasses.replace(TINY, steps=2), CPU, tmp_path)
    step = tmp_path / "step-2"
    data = next(step.glob("*.distcp"))
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:1000])
    else:
        {"missing": data, "no metadata": step / ".metadata", "no config": step / "config.json"}[damage].unlink()
    with pytest.raises(RopewalkError, match="a complete checkpoint") as error:
        train(dataclasses.replace(TINY, steps=2), CPU, tmp_path)
    assert f"delete {step}" in str(error.value)
    # As it says.
    shutil.rmtree(step)
    train(dataclasses.replace(TINY, steps=2), CPU, tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    with pytest.raises(Interrupted):
        train(TINY, CPU, tmp_path, stop=StopAfter(3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RopewalkError, match=r"a checkpoint of step 10 .*\n.*room.*\n.*\n.*step 4 is complete"):
            train(TINY, CPU, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert last_checkpoint(tmp_path) == 4
    whole, resumed = train(TINY, CPU)[0], train(TINY, CPU, tmp_path)[0]
    assert torch.equal(weights(whole), weights(resumed))
