"""Ring attention: keys and values travel from rank to rank, and each rank attends to one part after the other."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.kernels.constructors import arange, empty_like, full, zeros, zeros_like
from ropewalk.kernels.precision import working_dtype
from ropewalk.nn.attention.scores import ScoreBias, attend_with_lse
from ropewalk.nn.attention.visibility import Visibility
from ropewalk.nn.encodings.base import Encoding
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

    >>> ring_attention.__name__
    'ring_attention'
    """
    rule = _Rule(shards, bias, causal, window, scale)
    parameters = [] if bias is None else [x for x in bias.parameters() if x.requires_grad]
    return _Ring.apply(q, k, v, rule, *parameters)


class _Rule(NamedTuple):
    """Everything about a call except its tensors."""

    shards: Shards
    bias: Encoding | None
    causal: bool
    window: int | None
    scale: float

    def sees(self, query: Run, key: Run) -> bool:
        """Whether some query of a run sees some key of another run."""
        if query.sequence != key.sequence or (self.causal and key.start >= query.stop):
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
        return attend_with_lse(q, k, v, visibility, scale=self.scale, score_bias=score_bias)


def _tokens(run: Run) -> slice:
    return slice(run.offset, run.offset + run.length)


class _Travel:
    """Tensors that move to the next rank, while those of the rank before arrive."""

    def __init__(self, shards: Shards, x: Tensor) -> None:
        group = shards.mesh.get_group()
        following, before = (shards.rank + 1) % shards.ranks, (shards.rank - 1) % shards.ranks
        # Sent from a tensor of its own, so that nobody writes to it before it has left.
        self._sent, self._arrived = x.contiguous(), empty_like(x, memory_format=torch.contiguous_format)
        operations = [
            dist.P2POp(dist.isend, self._sent, dist.get_global_rank(group, following), group),
            dist.P2POp(dist.irecv, self._arrived, dist.get_global_rank(group, before), group),
        ]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arrived


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: _Rule, *parameters: nn.Parameter) -> Tensor:
        shards, sizes = rule.shards, (k.shape[-1], v.shape[-1])
        working, device = working_dtype(q), q.device
        out = zeros(*q.shape[:3], v.shape[-1], dtype=working, device=device)
        lse = full(q.shape[:3], float("-inf"), dtype=working, device=device)
        both = shards.padded(torch.cat([k, v], dim=-1), 2)
        for step in range(shards.ranks):
            travel = _Travel(shards, both) if step < shards.ranks - 1 else None
            for key in shards.runs[(shards.rank - step) % shards.ranks]:
                part = both[:, :, _tokens(key)]
                for query in shards.local:
                    if rule.sees(query, key):
                        rows = _tokens(query)
                        y, new = rule.attend(query, key, q[:, :, rows], *part.split(sizes, dim=-1))
                        total = torch.logaddexp(lse[:, :, rows], new)
                        old = _weight(lse[:, :, rows], total)
                        out[:, :, rows] = old * out[:, :, rows] + _weight(new, total) * y
                        lse[:, :, rows] = total
            both = both if travel is None else travel.wait()
        ctx.save_for_backward(q, k, v, out.to(v.dtype), lse)
        ctx.rule, ctx.parameters = rule, parameters
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
        (q, k, v, out, lse), rule, parameters = ctx.saved_tensors, ctx.rule, ctx.parameters
        shards, sizes, working = rule.shards, (k.shape[-1], v.shape[-1]), working_dtype(q)
        of_q, totals = zeros_like(q, dtype=working), [zeros_like(x) for x in parameters]
        both = shards.padded(torch.cat([k, v], dim=-1), 2)
        # Travels with the keys and values that it belongs to, and once more at the end, back to their rank.
        of_both = zeros_like(both, dtype=working)
        cotangent = cotangents[0].to(working)
        for step in range(shards.ranks):
            travel = _Travel(shards, both) if step < shards.ranks - 1 else None
            for key in shards.runs[(shards.rank - step) % shards.ranks]:
                part = both[:, :, _tokens(key)]
                for query in shards.local:
                    if not rule.sees(query, key):
                        continue
                    rows = _tokens(query)
                    with torch.enable_grad():
                        leaves = [x.detach().requires_grad_() for x in (q[:, :, rows], *part.split(sizes, dim=-1))]
                        y, new = rule.attend(query, key, *leaves)
                    # The output is the sum of exp(new - lse) y over all blocks.
                    weight, above = _weight(new.detach(), lse[:, :, rows]), cotangent[:, :, rows]
                    of_new = (weight * above * (y.detach() - out[:, :, rows])).sum(-1)
                    gradients = torch.autograd.grad(
                        (y, new), (*leaves, *parameters), ((weight * above).to(y.dtype), of_new), allow_unused=True
                    )
                    of_q[:, :, rows] += gradients[0]
                    of_both[:, :, _tokens(key)] += torch.cat([x.to(working) for x in gradients[1:3]], dim=-1)
                    for total, gradient in zip(totals, gradients[3:], strict=True):
                        if gradient is not None:
                            total += gradient
            of_both = _Travel(shards, of_both).wait()
            both = both if travel is None else travel.wait()
        of_k, of_v = of_both[:, :, : k.shape[2]].split(sizes, dim=-1)
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, *totals


def _weight(part: Tensor, total: Tensor) -> Tensor:
    """Return exp(part - total) [..., 1]; 0 where there is no visible key."""
    return torch.where(part == float("-inf"), 0.0, torch.exp(part - total)).unsqueeze(-1)
