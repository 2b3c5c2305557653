"""train: one run, on one process or on the ranks of torchrun, with checkpoints from which it resumes bit for bit."""

import math
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from ropewalk.errors import RopewalkError
from ropewalk.lab.checkpoints import last_checkpoint, read_checkpoint, write_checkpoint
from ropewalk.lab.decoder import Decoder
from ropewalk.lab.draws import draws
from ropewalk.lab.encodings import source_of
from ropewalk.lab.evaluation import Curves, evaluate, validation_loss
from ropewalk.lab.journal import Journal
from ropewalk.lab.ranks import largest, on_rank_0, rank_and_ranks
from ropewalk.lab.run import Run, make_task
from ropewalk.lab.tasks import IGNORED, Batch, Task
from ropewalk.parallel.shards import Shards

__all__ = [
    "Interrupted",
    "ParallelName",
    "RunResult",
    "Settings",
    "Training",
    "Wish",
    "config_of",
    "make_model",
    "side_by_side",
    "train",
    "training",
]

ParallelName = Literal["ddp", "fsdp", "context"]
ResultT = TypeVar("ResultT")
# Yields after every step, and returns a result.
Training = Generator[None, None, ResultT]

BETAS, WEIGHT_DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
# The rate rises over a tenth of the steps, and falls to a tenth by a cosine.
WARM_UP, LAST_RATE = 0.1, 0.1
# Steps whose samples are created at once.
_CHUNK = 32
# Steps before a CUDA graph is captured: kernels are compiled, and optimizer states exist.
_EAGER_STEPS = 3
# Kernels of scaled_dot_product_attention. Not cuDNN's, which torch prefers on Hopper GPUs: gradients can be NaN, for
# lengths that are no multiple of its tiles (pytorch#196678, cudnn-frontend#160).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Seeds of runs are below: first positions are drawn with the seed plus this number.
_OF_POSITIONS = 2**62


@dataclass(frozen=True)
class Settings:
    """How a run is computed. None of it changes what is trained, up to rounding.

    Attributes:
        device: Device of this rank.
        dtype: "float32", or "bfloat16" by autocast.
        parallel: How ranks share the work: copies of the model ("ddp"), shards of its parameters ("fsdp") or of the
            sequences ("context").
        compiled: Whether the model is compiled.
        every: Steps between validations.
        saved_every: Steps between checkpoints; None for one at the end.
    """

    device: torch.device
    dtype: Literal["float32", "bfloat16"] = "float32"
    parallel: ParallelName = "ddp"
    compiled: bool = False
    every: int = 50
    saved_every: int | None = None


@dataclass(frozen=True)
class RunResult:
    """What a run has measured.

    Attributes:
        curves: "loss by step", and what `evaluate` returns. A loss is None where it is not finite.
        seconds: Time of the training steps and of their samples, without validations and checkpoints; of the steps
            since it was resumed, if it was.
        tokens: Number of tokens of these steps.
        digest: Hash of the text, or None.
    """

    curves: Curves
    seconds: float
    tokens: int
    digest: str | None

    @property
    def final_loss(self) -> float | None:
        """The last validation loss; None if it is not finite."""
        return self.curves["loss by step"][-1][1]


class Wish(Protocol):
    """What says whether a run should stop: a threading.Event, or one of several processes."""

    def is_set(self) -> bool:
        """Whether it should."""
        ...


class Interrupted(Exception):  # noqa: N818 - not an error: it was asked for
    """A run that was asked to stop, after its step, with a checkpoint."""


def make_model(run: Run, task: Task) -> Decoder:
    """Create the model of a run, with the parameters that its seed determines."""
    return Decoder(
        run.size,
        run.encoding,
        vocabulary=task.vocabulary,
        length=task.tokens(run.length),
        attention=run.attention,
        qk_norm=run.qk_norm,
        seed=run.seed,
    )


def config_of(run: Run, settings: Settings, digest: str | None) -> dict[str, Any]:
    """What two runs have in common if one can continue the other, or stand for it: values of JSON.

    Args:
        run: The run.
        settings: How it is computed.
        digest: Hash of its text.
    """
    ranks = rank_and_ranks()[1]
    return {
        **run.as_json(),
        "digest": digest,
        "source of encoding": source_of(run.encoding),
        "torch": str(torch.__version__),
        "device": settings.device.type,
        "dtype": settings.dtype,
        "ranks": ranks,
        "parallel": settings.parallel if ranks > 1 else None,
        "every": settings.every,
    }


def train(
    run: Run,
    settings: Settings,
    folder: Path | None = None,
    *,
    parent: Decoder | None = None,
    task: Task | None = None,
    stop: Wish | None = None,
    report: Callable[[int, float], None] | None = None,
) -> tuple[Decoder, RunResult]:
    """Train and evaluate one model. All ranks call it.

    What an encoding draws at random is a function of seed and step too. The generators of the caller are left alone.

    Args:
        run: The run.
        settings: How it is computed.
        folder: Folder of its checkpoints and its journal, from which it resumes; None to write nothing.
        parent: The trained model of `run.parent`.
        task: A task of your own; None for the one that the run names.
        stop: Ends the run after the current step, with a checkpoint, when it is set on some rank.
        report: Called after every validation with step and loss.

    Returns:
        The model and what was measured. With "fsdp" its parameters are DTensors.

    Raises:
        RopewalkError: If the folder has a checkpoint of another run, or if it cannot be written.
        Interrupted: If `stop` was set.
    """
    steps = training(run, settings, folder, parent=parent, task=task, stop=stop, report=report)
    (result,) = side_by_side([steps], settings.device)
    return result


def side_by_side(trainings: Iterable[Training[ResultT]], device: torch.device, *, count: int = 1) -> list[ResultT]:
    """Advance several trainings in one process, one step of each after the other.

    On a CUDA device each has a stream, so that small models share it.

    Args:
        trainings: What `training` returns, or generators that contain it. They are started when they are needed.
        device: Device of all.
        count: How many are advanced at a time.

    Returns:
        What they return, in their order.

    Raises:
        Interrupted: When all that were started have written a checkpoint.
    """
    waiting = enumerate(trainings)
    results: dict[int, ResultT] = {}
    active: dict[int, tuple[Training[ResultT], Any]] = {}
    interrupted: Interrupted | None = None
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        while True:
            while len(active) < count and interrupted is None:
                index, steps = next(waiting, (None, None))
                if index is None or steps is None:
                    break
                own_stream = on_gpu and count > 1
                active[index] = steps, torch.cuda.stream(torch.cuda.Stream(device)) if own_stream else nullcontext()
            if not active:
                break
            for index, (steps, stream) in list(active.items()):
                try:
                    with stream:
                        next(steps)
                except StopIteration as end:
                    results[index] = end.value
                    del active[index]
                except Interrupted as reason:
                    interrupted = reason
                    del active[index]
    if interrupted is not None:
        raise interrupted
    return [results[index] for index in sorted(results)]


def training(
    run: Run,
    settings: Settings,
    folder: Path | None = None,
    *,
    parent: Decoder | None = None,
    task: Task | None = None,
    stop: Wish | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Training[tuple[Decoder, RunResult]]:
    """`train` as a generator that yields after every step, for `side_by_side`. It has the same arguments."""
    task, device = task or make_task(run), settings.device
    task.require(run.batch, run.length, run.lengths)
    decoder = make_model(run, task)
    if parent is not None:
        _copy_weights(decoder, parent)
    decoder.to(device)
    _require_offset(run, settings, decoder)
    trainer = _Trainer(run, settings, task, decoder)
    config = config_of(run, settings, task.digest)
    first = 0 if folder is None else on_rank_0(lambda: last_checkpoint(folder))
    if first and folder is not None:
        read_checkpoint(folder, first, trainer.model, trainer.optimizer, config)
    journal = Journal(folder, after=first)
    loss_by_step = journal.losses()

    def validate(step: int) -> None:
        trainer.pause()
        with trainer.evaluating(step):
            loss = validation_loss(trainer.whole, task, run, device)
        finite = loss if math.isfinite(loss) else None
        loss_by_step.append((step, finite))
        journal.add(step, finite, trainer.seconds)
        if report is not None:
            report(step, loss)

    if first == 0:
        validate(0)
    step = first
    for step, batch, count in _samples(run, task, first):
        trainer.step(step, batch, count)
        last = step == run.steps
        wishes = stop is not None and stop.is_set()
        due = settings.saved_every is not None and step % settings.saved_every == 0
        if trainer.ranks > 1:
            wishes = largest(float(wishes), device) > 0
        if last or step % settings.every == 0:
            validate(step)
        if folder is not None and (last or due or wishes):
            trainer.pause()
            write_checkpoint(folder, step, trainer.model, trainer.optimizer, config)
        if wishes and not last:
            raise Interrupted(f"interrupted after step {step}")
        yield
    with trainer.evaluating(step):
        curves: Curves = {"loss by step": loss_by_step, **evaluate(trainer.whole, task, run, device)}
    tokens = (step - first) * run.batch * task.tokens(run.length)
    return decoder.eval(), RunResult(curves, trainer.seconds, tokens, task.digest)


def _require_offset(run: Run, settings: Settings, decoder: Decoder) -> None:
    if not run.offset:
        return
    if decoder.encoding.length is not None:
        raise RopewalkError(
            asked=f"positions up to {run.offset:,} with encoding {run.encoding}",
            expected="an encoding without a longest position",
            got=f"one of {decoder.encoding.length:,} positions",
            do="choose another encoding",
        )
    if settings.parallel == "context" and rank_and_ranks()[1] > 1:
        raise RopewalkError(
            asked=f"samples that begin at a random position below {run.offset:,}, over ranks",
            expected="ranks that share the batch",
            got="--parallel context: all samples of shards begin at position 0",
            do="use --parallel ddp or fsdp",
        )


def _samples(run: Run, task: Task, first: int) -> Iterator[tuple[int, Batch, Tensor]]:
    """Steps after `first`, their samples of all ranks, and how many of their tokens are scored."""
    for start in range(first + 1, run.steps + 1, _CHUNK):
        steps = range(start, min(start + _CHUNK, run.steps + 1))
        batch = task.batches(run.seed, steps, range(run.batch), run.length)
        counts = (batch.targets != IGNORED).sum((1, 2))
        for index, step in enumerate(steps):
            yield step, Batch(batch.inputs[index], batch.targets[index]), counts[index]


def _copy_weights(model: nn.Module, parent: nn.Module) -> None:
    """Copy the weights of another model. Parameters of an encoding that the other does not have stay as they are."""
    own, other = model.state_dict(), parent.state_dict()
    shared = {name: x for name, x in other.items() if name in own and own[name].shape == x.shape}
    model.load_state_dict({**own, **shared})


class _Trainer:
    """A model with its optimizer, wrapped for the ranks, and one step of training."""

    def __init__(self, run: Run, settings: Settings, task: Task, decoder: Decoder) -> None:
        self.run, self.settings, self.task, self.device = run, settings, task, settings.device
        self.rank, self.ranks = rank_and_ranks()
        self.decoder = decoder
        self.seconds = 0.0
        self._running_since: float | None = None
        self.shards: Shards | None = None
        self.model: nn.Module = decoder
        self.tokens = task.tokens(run.length)
        if self.ranks > 1:
            self._share()
        # What validates: calls without shards.
        self.whole: nn.Module = decoder if self.shards is not None else self.model
        if settings.compiled:
            self.compiled: nn.Module = torch.compile(self.model)  # pyright: ignore[reportAttributeAccessIssue]
        else:
            self.compiled = self.model
        decayed = [x for x in self.model.parameters() if x.ndim >= 2]
        others = [x for x in self.model.parameters() if x.ndim < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        on_gpu = self.device.type == "cuda"
        rate = torch.tensor(run.rate, device=self.device) if on_gpu else run.rate
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=rate, betas=BETAS, fused=on_gpu, capturable=on_gpu
        )
        self.captured: _CapturedStep | None = None
        self.captures = on_gpu and self.ranks == 1
        self.eager_steps = 0

    def _share(self) -> None:
        if self.settings.parallel == "context":
            mesh = init_device_mesh(self.device.type, (self.ranks,))
            self.shards = Shards(mesh, self.tokens)
            return
        if self.run.batch % self.ranks:
            raise RopewalkError(
                asked=f"a batch of {self.run.batch} on {self.ranks} ranks",
                expected="a batch that the ranks divide",
                got=f"{self.run.batch} samples",
                do="use a number of ranks that divides it",
            )
        if self.settings.parallel == "fsdp":
            # Parameters of the encoding, which all layers share, belong to the whole model.
            shared = set(self.decoder.encoding.parameters())
            for block in self.decoder.blocks:
                fully_shard(block, ignored_params=shared)
            fully_shard(self.decoder)
        else:
            self.model = DistributedDataParallel(self.decoder)

    def step(self, step: int, batch: Batch, count: Tensor) -> None:
        """Train one step on the samples of all ranks."""
        if self._running_since is None:
            self._running_since = time.perf_counter()
        torch.manual_seed(_seed_of_step(self.run, step))
        batch, positions = self._of_rank(batch), self._positions(step)
        for group in self.optimizer.param_groups:
            rate = self.run.rate * _share_of_rate(step, self.run.steps)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        tensors = [x.to(self.device, non_blocking=True) for x in (*batch, count)]
        tensors.append(positions.to(self.device)) if positions is not None else None
        if not self.captures:
            self._compute(*tensors)
        elif self.captured is not None:
            self.captured.replay(tensors)
        elif self.eager_steps < _EAGER_STEPS:
            self.eager_steps += 1
            _on_side_stream(self._compute, tensors)
        else:
            self.captured = _CapturedStep(self._compute, tensors)
            self.captured.replay(tensors)

    def pause(self) -> None:
        """Add the time of the steps since the last pause, which the device has computed by then."""
        if self._running_since is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds += time.perf_counter() - self._running_since
            self._running_since = None

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """The model in evaluation mode, with the random numbers of a step."""
        torch.manual_seed(_seed_of_step(self.run, step))
        self.decoder.eval()
        with sdpa_kernel(_KERNELS):
            yield
        self.decoder.train()

    def _of_rank(self, batch: Batch) -> Batch:
        if self.ranks == 1:
            return batch
        if self.shards is not None:
            return Batch(*(self.shards.cut(x, dim=1) for x in batch))
        return Batch(*(x.chunk(self.ranks)[self.rank] for x in batch))

    def _positions(self, step: int) -> Tensor | None:
        """Positions of each sample, from a random one on."""
        if not self.run.offset:
            return None
        numbers = draws(self.run.seed + _OF_POSITIONS, [step], range(self.run.batch), 1)[0]
        starts = torch.from_numpy((numbers % self.run.offset).astype("int64"))
        positions = starts + torch.arange(self.tokens)
        return positions if self.ranks == 1 else positions.chunk(self.ranks)[self.rank]

    def _compute(self, inputs: Tensor, targets: Tensor, count: Tensor, positions: Tensor | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        bfloat16 = self.settings.dtype == "bfloat16"
        with sdpa_kernel(_KERNELS), torch.autocast(self.device.type, torch.bfloat16) if bfloat16 else nullcontext():
            logits = self.compiled(inputs, positions, self.shards)
        logits = logits.float() if bfloat16 else logits
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        # DDP and FSDP average gradients over ranks: what is averaged is the share of this rank, times the ranks.
        averaged = self.ranks if self.shards is None else 1
        (total * averaged / count).backward()
        if self.shards is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()


class _CapturedStep:
    """A step as one CUDA graph: small models are otherwise limited by the host that launches their kernels."""

    def __init__(self, compute: Callable[..., None], tensors: list[Tensor]) -> None:
        self.inputs = [x.clone() for x in tensors]
        self.graph = torch.cuda.CUDAGraph()
        # Graphs that were captured on one stream share the workspace of its matrix products: side by side they would
        # overwrite each other's sums.
        with torch.cuda.graph(self.graph, stream=torch.cuda.Stream()):
            compute(*self.inputs)

    def replay(self, tensors: list[Tensor]) -> None:
        for buffer, value in zip(self.inputs, tensors, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.graph.replay()


def _on_side_stream(compute: Callable[..., None], tensors: list[Tensor]) -> None:
    """As PyTorch asks for before a capture: memory of these steps belongs to another stream than the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute(*tensors)
    torch.cuda.current_stream().wait_stream(stream)


def _share_of_rate(step: int, steps: int) -> float:
    """Factor on the largest rate: a linear rise, and half a period of a cosine."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return step / rise
    part = (step - rise) / max(1, steps - rise)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * part)) / 2


def _seed_of_step(run: Run, step: int) -> int:
    return zlib.crc32(f"{run.seed} step {step}".encode())
