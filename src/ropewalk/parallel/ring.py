"""Ring attention: keys and values travel from rank to rank, and each rank attends to one part after the other."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import arange, empty_like, full, zeros, zeros_like
from ropewalk.kernels.precision import has_autocast, working_dtype
from ropewalk.kernels.torch_internals import own_parameters
from ropewalk.nn.attention.scores import ScoreBias, attend_with_lse, part_weight
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.base import Encoding
from ropewalk.parallel.collectives import on_mesh
from ropewalk.parallel.layout import Run
from ropewalk.parallel.shards import Shards

__all__ = ["ring_attention"]


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    bias: Encoding | None,
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> Tensor:
    """Softmax attention in which each rank has its own keys and those of one other rank at a time.

    Outputs over the keys of each rank are merged by the log-sum-exp of their scores (Liu et al., 2310.01889). The
    backward pass saves the output and the log-sum-exp, and lets keys and values travel again, with their gradients. So
    memory does not grow with the number of ranks. Differs from the paper: a bias is computed for each block.

    Args:
        q: Queries of this rank, after the encoding [batch, heads, tokens, dim].
        k: Keys of this rank, after the encoding [batch, kv_heads, tokens, dim].
        v: Values of this rank [batch, kv_heads, tokens, v_dim].
        shards: Which tokens each rank has.
        bias: An encoding with a bias, or None.
        causal: Hide the keys after a query.
        window: Number of keys that a query sees, or None.
        scale: Factor on the scores.

    Returns:
        Tensor [batch, heads, tokens, v_dim].

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> x, v = torch.zeros(1, 1, 3, 2), torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> options = {"causal": True, "window": None, "scale": 1.0}
    >>> y = ring_attention(x, x, v, Shards(mesh, 3), None, **options)  # the mean of the visible values
    >>> [round(number, 6) for number in y.flatten().tolist()]
    [1.0, 2.0, 3.0]
    >>> dist.destroy_process_group()
    """
    device = q.device.type
    if has_autocast(device) and torch.is_autocast_enabled(device) and v.dtype != torch.float64:
        # As in SDPA. Both passes then compute in this dtype.
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    learned = [] if bias is None else _learned(bias)
    rule = _Rule(shards, bias, causal, window, scale, tuple(learned))
    with torch.autocast(device, enabled=False):
        return _Ring.apply(q, k, v, rule, *(_read(*place) for place in learned))


def _learned(encoding: Encoding) -> list[tuple[nn.Module, str]]:
    """Return where an encoding has tensors that need gradients: modules, and names in them."""
    places: list[tuple[nn.Module, str]] = []
    for module in encoding.modules():
        tensors = {**vars(module), **own_parameters(module)}
        places += [(module, name) for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad]
    return places


def _read(module: nn.Module, name: str) -> Tensor:
    return getattr(module, name)


@contextlib.contextmanager
def _replaced(places: Sequence[tuple[nn.Module, str]], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Use other tensors in modules: those of the forward pass, which modules may no longer have."""
    originals = [_read(*place) for place in places]
    try:
        for (module, name), x in zip(places, tensors, strict=True):
            _home(module, name)[name] = x
        yield
    finally:
        for (module, name), x in zip(places, originals, strict=True):
            _home(module, name)[name] = x


def _home(module: nn.Module, name: str) -> dict[str, Any]:
    parameters = own_parameters(module)
    return parameters if name in parameters else vars(module)


class _Rule(NamedTuple):
    """Everything about a call except its tensors."""

    shards: Shards
    bias: Encoding | None
    causal: bool
    window: int | None
    scale: float
    learned: tuple[tuple[nn.Module, str], ...]

    def pairs(self, rank: int) -> Iterator[tuple[Run, Run]]:
        """Yield the runs of queries of this rank, and the runs of keys of a rank that they see."""
        queries: dict[int, list[Run]] = {}
        for run in self.shards.local:
            queries.setdefault(run.sequence, []).append(run)
        for key in self.shards.runs[rank]:
            yield from ((query, key) for query in queries.get(key.sequence, ()) if self.sees(query, key))

    def sees(self, query: Run, key: Run) -> bool:
        """Whether some query of a run sees some key of a run of the same sequence."""
        if self.causal and key.start >= query.stop:
            return False
        if self.window is None:
            return True
        return query.start - key.stop + 1 < self.window and key.start - query.stop + 1 < self.window

    def attend(self, query: Run, key: Run, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sum-exp of the queries of a run over the keys of a run."""
        same, ahead = query == key, query.start - key.start
        if same:
            visibility = Visibility(self.causal, window=self.window)
        elif self.window is None:
            # Runs do not overlap, so a run that is seen is before the queries, or there is no causality.
            visibility = Visibility()
        else:
            indices = arange(key.length, device=q.device)
            visibility = Visibility(self.causal, ahead, window=self.window, key_indices=indices)
        score_bias = None
        if self.bias is not None:
            ids = [arange(run.start, run.stop, device=q.device) for run in (query, key)]
            score_bias = ScoreBias(self.bias, ids[0], ids[1])
        options: dict[str, Any] = {"scale": self.scale, "score_bias": score_bias, "lse_dtype": torch.float64}
        return attend_with_lse(q, k, v, visibility, **options)


def _tokens(run: Run) -> slice:
    return slice(run.offset, run.offset + run.length)


class _Travel:
    """A tensor that moves to the next rank, while that of the rank before arrives. Nobody writes to it meanwhile."""

    def __init__(self, shards: Shards, x: Tensor) -> None:
        group = shards.mesh.get_group()
        following, before = (shards.rank + 1) % shards.ranks, (shards.rank - 1) % shards.ranks
        self._device, self._sent = x.device, on_mesh(x.contiguous(), shards.mesh)
        self._arrived = empty_like(self._sent)
        operations = [
            dist.P2POp(dist.isend, self._sent, dist.get_global_rank(group, following), group),
            dist.P2POp(dist.irecv, self._arrived, dist.get_global_rank(group, before), group),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arrived.to(self._device)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: _Rule, *learned: Tensor) -> Tensor:
        shards, sizes = rule.shards, (k.shape[-1], v.shape[-1])
        working, device = working_dtype(q), q.device
        out = zeros(*q.shape[:3], v.shape[-1], dtype=working, device=device)
        # A weight of a part is exp of a difference of these, which float32 would round: they are small.
        lse = full(q.shape[:3], float("-inf"), dtype=torch.float64, device=device)
        both = shards.padded(torch.cat([k, v], dim=-1), 2)
        for step in range(shards.ranks):
            travel = _Travel(shards, both) if step < shards.ranks - 1 else None
            for query, key in rule.pairs((shards.rank - step) % shards.ranks):
                rows = _tokens(query)
                y, new = rule.attend(query, key, *_exact(q[:, :, rows], *both[:, :, _tokens(key)].split(sizes, dim=-1)))
                out[:, :, rows], lse[:, :, rows] = _merged(out[:, :, rows], lse[:, :, rows], y, new)
            both = both if travel is None else travel.wait()
        # Not rounded: the gradient of a block depends on the difference between its output and the whole one.
        ctx.save_for_backward(q, k, v, out, lse, *learned)
        ctx.rule = rule
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RopewalkError(
                asked='the gradient of a gradient of parallel.attention(method="ring")',
                expected="one backward pass: the ring keeps what that needs",
                got="create_graph=True",
                do='pass method="gather" or "ulysses"',
            )
        (q, k, v, out, lse, *learned), rule = ctx.saved_tensors, ctx.rule
        shards, sizes, working = rule.shards, (k.shape[-1], v.shape[-1]), working_dtype(q)
        learned = [x.detach().requires_grad_() for x in learned]
        of_q, totals = zeros_like(q, dtype=working), [zeros_like(x) for x in learned]
        both = shards.padded(torch.cat([k, v], dim=-1), 2)
        # Travels with the keys and values that it belongs to, and once more at the end, back to their rank.
        of_both = zeros_like(both, dtype=working)
        cotangent = cotangents[0].to(working)
        for step in range(shards.ranks):
            travel = _Travel(shards, both) if step < shards.ranks - 1 else None
            for query, key in rule.pairs((shards.rank - step) % shards.ranks):
                rows, columns = _tokens(query), _tokens(key)
                block = _exact(q[:, :, rows], *both[:, :, columns].split(sizes, dim=-1))
                with torch.enable_grad(), _replaced(rule.learned, learned):
                    leaves = [x.detach().requires_grad_() for x in block]
                    y, new = rule.attend(query, key, *leaves)
                # The output is the sum of exp(new - lse) y over all blocks.
                weight = part_weight(new.detach(), lse[:, :, rows]).to(working)
                above = cotangent[:, :, rows]
                of_new = (weight * above * (y.detach() - out[:, :, rows])).sum(-1).to(new.dtype)
                gradients = torch.autograd.grad(
                    (y, new), (*leaves, *learned), ((weight * above).to(y.dtype), of_new), allow_unused=True
                )
                of_q[:, :, rows] += gradients[0]
                of_both[:, :, columns] += torch.cat([x.to(working) for x in gradients[1:3]], dim=-1)
                for total, gradient in zip(totals, gradients[3:], strict=True):
                    if gradient is not None:
                        total += gradient
            of_both = _Travel(shards, of_both).wait() if shards.ranks > 1 else of_both
            both = both if travel is None else travel.wait()
        of_k, of_v = of_both[:, :, : k.shape[2]].split(sizes, dim=-1)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, *totals


def _merged(out: Tensor, lse: Tensor, y: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs and log-sum-exp over two parts of the keys."""
    total = torch.logaddexp(lse, new)
    old, fresh = part_weight(lse, total).to(out.dtype), part_weight(new, total).to(out.dtype)
    # The output of the heavier part is not multiplied: only what is added to it is rounded.
    return torch.where(old > fresh, out + fresh * (y - out), y + old * (out - y)), total


def _exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in float32 or float64 on a CPU, which computes in it in any case: blocks are then not rounded."""
    return tuple(x.to(working_dtype(x)) if x.device.type == "cpu" else x for x in tensors)
