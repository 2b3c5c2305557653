"""Real tables for the models of diffusers that compute complex ones: Qwen-Image and Z-Image.

Devices without complex numbers then run them. A table [seq, pairs] becomes [seq, 2 * pairs]: cos, then sin.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Restore", "real_table", "use_real_tables"]

# Makes tables real, and returns the function that undoes it.
Restore = Callable[[], Callable[[], None]]


def real_table(table: Tensor) -> Tensor:
    """Return a complex table [..., pairs] as [..., 2 * pairs]: its real parts, then its imaginary parts.

    >>> real_table(torch.complex(torch.ones(1, 2), torch.zeros(1, 2))).tolist()
    [[1.0, 1.0, 0.0, 0.0]]
    """
    return torch.cat((table.real, table.imag), dim=-1)


class RealRopeEmbedder:
    """Z-Image's table of positions, with real numbers. Positions [tokens, axes] -> [tokens, 2 * pairs].

    Args:
        plain: The RopeEmbedder of the model.

    >>> RealRopeEmbedder(None).plain is None
    True
    """

    def __init__(self, plain: Any) -> None:
        self.plain = plain
        self._tables: list[Tensor] = []

    def __call__(self, ids: Tensor) -> Tensor:
        """Return cos, then sin, of the positions."""
        if not self._tables:
            plain = self.plain
            complex_tables = plain.precompute_freqs_cis(plain.axes_dims, plain.axes_lens, theta=plain.theta)
            self._tables = [torch.stack((table.real, table.imag), dim=-2) for table in complex_tables]
        if self._tables[0].device != ids.device:
            self._tables = [table.to(ids.device) for table in self._tables]
        rows = [table[ids[:, axis]] for axis, table in enumerate(self._tables)]
        return torch.cat(rows, dim=-1).flatten(-2)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain, (self.plain,)


class RealForward:
    """The forward of Qwen-Image's table of positions: computed on the CPU, and moved to the device as real numbers.

    A copy or a pickle of the model contains the plain forward.

    Args:
        module: The module of the model.

    >>> RealForward(nn.Identity()).kept
    {}
    """

    most = 8

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept: dict[Any, tuple[Tensor, ...]] = {}

    def __call__(self, video_fhw: Any, device: Any = None, max_txt_seq_len: Any = None, **options: Any) -> Any:
        """Return the real tables of image and text."""
        cpu = torch.device("cpu")
        key = None if options else (repr(video_fhw), str(device), int(max_txt_seq_len))
        if key is not None and key in self.kept:
            return self.kept[key]
        plain = type(self.module).forward
        tables = plain(self.module, video_fhw, device=cpu, max_txt_seq_len=max_txt_seq_len, **options)
        result = tuple(real_table(table).to(device or cpu) for table in tables)
        if key is not None:
            # The same few resolutions come again in every step.
            while len(self.kept) >= self.most:
                self.kept.pop(next(iter(self.kept)))
            self.kept[key] = result
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


def _plain(plain: Any) -> Any:
    return plain


def use_real_tables(model: nn.Module) -> list[Restore]:
    """Return functions that make the complex tables of a model real.

    >>> use_real_tables(nn.Linear(2, 2))
    []
    """
    makers: list[Restore] = []
    embedder = getattr(model, "rope_embedder", None)
    if type(embedder).__name__ == "RopeEmbedder" and type(embedder).__module__.endswith("transformer_z_image"):
        makers.append(lambda: _replace(model, "rope_embedder", RealRopeEmbedder(embedder), embedder))
    for module in model.modules():
        if type(module).__name__ in ("QwenEmbedRope", "QwenEmbedLayer3DRope") and _has_own_forward(module):
            makers.append(lambda module=module: _replace_forward(module))
    return makers


def _replace(model: Any, name: str, real: Any, plain: Any) -> Callable[[], None]:
    setattr(model, name, real)
    return lambda: setattr(model, name, plain)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a call of the module runs the forward of its class. Copies have it as an attribute, bound to them."""
    forward = vars(module).get("forward")
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


def _replace_forward(module: Any) -> Callable[[], None]:
    module.forward = RealForward(module)

    def restore() -> None:
        del module.forward

    return restore
