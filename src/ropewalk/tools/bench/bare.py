"""What the host cannot go below: a bare launch of a Triton kernel, and autograd Functions that do almost nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["bare_function", "bare_launch", "bare_norm_function", "copied"]


def copied(x: Tensor) -> Tensor:
    """A copy of x in new memory.

    >>> copied(torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    return torch.empty_like(x).copy_(x)


def bare_function(
    fill: Callable[[Tensor], Tensor], launch: Callable[[], object] | None = None
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """An `autograd.Function` like that of a rotation, which computes nothing: two inputs and two outputs.

    Args:
        fill: Makes an output or a gradient like its argument: `torch.empty_like` or `copied`.
        launch: Called once in forward and once in backward.

    Returns:
        The function of q and k.

    >>> q, k = (torch.ones(2, requires_grad=True) for _ in range(2))
    >>> outputs = bare_function(copied)(q, k)
    >>> torch.autograd.grad(outputs, (q, k), outputs)
    (tensor([1., 1.]), tensor([1., 1.]))
    """

    # No loops over tensors or launches: on a CPU they take a twentieth of the whole call.
    def both(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return fill(q), fill(k)

    def both_and_launch(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        outputs = fill(q), fill(k)
        launch()  # pyright: ignore[reportOptionalCall]
        return outputs

    method = both if launch is None else both_and_launch
    return _applied(method, method)


def bare_norm_function(
    fill: Callable[[Tensor], Tensor], weight: Tensor, launch: Callable[[], object] | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """An `autograd.Function` like that of the norms and a rotation, which computes nothing: four inputs, two outputs.

    Args:
        fill: Makes an output or a gradient like its argument: `torch.empty_like` or `copied`.
        weight: A tensor like the weights. Nothing is saved for the backward pass.
        launch: Called once in forward and twice in backward.

    Returns:
        The function of q, k and their weights.

    >>> inputs = [torch.ones(size, requires_grad=True) for size in (4, 4, 2, 2)]
    >>> outputs = bare_norm_function(copied, torch.ones(2))(*inputs)
    >>> [gradient.shape[0] for gradient in torch.autograd.grad(outputs, inputs, outputs)]
    [4, 4, 2, 2]
    """

    def forward(ctx: Any, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        outputs = fill(q), fill(k)
        if launch is not None:
            launch()
        return outputs

    def backward(ctx: Any, q_gradient: Tensor, k_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradients = fill(q_gradient), fill(k_gradient), fill(weight), fill(weight)
        if launch is not None:
            launch()
            launch()
        return gradients

    return _applied(forward, backward)


def _applied(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type("Bare", (torch.autograd.Function,), methods)
    return function.apply


def bare_launch(q: Tensor, k: Tensor) -> Callable[[], object]:
    """A function that launches a compiled kernel through its own launcher, with six tensors and four numbers.

    Args:
        q: [batch, heads, seq, dim], on a GPU.
        k: [batch, k heads, seq, dim].

    Returns:
        The function. It launches on the stream that is current now.
    """
    from ropewalk.tools.bench.bare_kernel import touch

    table = torch.ones(q.shape[-2], q.shape[-1] // 2, device=q.device)
    arguments = (q, k, torch.empty_like(q), torch.empty_like(k), table, table.clone())
    arguments += (q.shape[-2], q.shape[-3], k.shape[-3], q.shape[-1])
    compiled: Any = touch[(1,)](*arguments)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream = torch.cuda.current_stream(q.device).cuda_stream

    def launch() -> object:
        return run(1, 1, 1, stream, function, metadata, None, None, None, *arguments)

    return launch
