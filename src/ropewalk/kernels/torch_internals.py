"""What torch does around a call: compilers, exporters, transforms, streams. No other file uses torch's private APIs.

A kernel may be given plain tensors, in an eager call that nothing looks into; this module tells whether a call is one.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "MASKS",
    "OWN",
    "OWN_METHODS",
    "constant_to_compiler",
    "current_stream",
    "delay",
    "fake_mode",
    "has_hooks",
    "is_eager",
    "is_exporting",
    "is_masked",
    "is_one",
    "is_plain",
    "is_transformed",
    "openmp_team",
    "outside_modes",
    "own_tensors",
    "view_base",
    "why_not_plain",
    "why_view_is_fixed",
]

# What torch.zeros, torch.tensor and so on are, whatever somebody has put under these names since.
OWN: Any = torch._C._VariableFunctions  # pyright: ignore[reportAttributeAccessIssue]
# And what Tensor.new_zeros and so on are.
OWN_METHODS = torch._C.TensorBase

_Parameter = torch.nn.Parameter
_is_zerotensor = torch._is_zerotensor  # pyright: ignore[reportPrivateImportUsage]
_is_functional_tensor = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]

# What the C kernel asks of a tensor itself. That a tensor has no memory it sees without asking.
MASKS: tuple[Callable[[Tensor], bool], ...] = (is_legacy_batchedtensor, Tensor.is_neg)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether more than its forward runs when this module is called.

    >>> has_hooks(torch.nn.Identity())
    False
    """
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks)


def own_tensors(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The parameters and buffers that a module holds directly, by name; None for those that are declared and not there.

    >>> list(own_tensors(torch.nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    return {**module._parameters, **module._buffers}


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are ordinary tensors in an ordinary eager call, which nothing traces, transforms or intercepts.

    >>> is_plain(torch.ones(2)), torch.func.vmap(lambda x: torch.tensor(is_plain(x)))(torch.ones(1)).item()
    (True, False)
    """
    if not is_eager():
        return False
    # Written out: decoding waits for this.
    for tensor in tensors:
        if tensor is None:
            continue
        kind = type(tensor)
        if (kind is not Tensor and kind is not _Parameter) or (
            is_legacy_batchedtensor(tensor)
            or tensor.is_neg()
            or _is_zerotensor(tensor)
            or _is_functional_tensor(tensor)
        ):
            return False
    return True


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts what is called now.

    >>> is_eager()
    True
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def _is_ordinary(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is torch.nn.Parameter) and not is_masked(tensor)


def is_masked(x: Tensor) -> bool:
    """Whether the memory of a tensor of a plain type must not be read directly.

    The batched tensors of `is_grads_batched`, zero and functional tensors have none, and in that of the imaginary part
    of a conjugate every sign is the opposite.

    >>> is_masked(torch.ones(1)), is_masked(torch.ones(1, dtype=torch.complex64).conj().imag)
    (False, True)
    """
    return is_legacy_batchedtensor(x) or x.is_neg() or _is_zerotensor(x) or _is_functional_tensor(x)


def is_transformed() -> bool:
    """Whether functorch or forward-mode differentiation is at work.

    >>> is_transformed()
    False
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Whether torch.export is at work.

    The flag and not `torch.compiler.is_exporting`, which torch 2.11 answers with True whatever it compiles.

    >>> is_exporting()
    False
    """
    return torch.compiler._is_exporting_flag


def is_one(length: Any) -> bool:
    """Whether a compiler knows that a length is 1. A length that depends on data is not asked.

    >>> is_one(1), is_one(2)
    (True, False)
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(length == 1)


def why_not_plain(*tensors: Tensor | None) -> str | None:
    """What keeps these tensors from a kernel, in words; None if nothing does.

    >>> why_not_plain(torch.ones(1)) is None
    True
    """
    if torch.compiler.is_compiling():
        return "an export" if is_exporting() else "a compiler"
    if is_transformed():
        return "a transform of torch.func, or forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "a dispatch mode, such as fake tensors"
    odd = [tensor for tensor in tensors if tensor is not None and not _is_ordinary(tensor)]
    if not odd:
        return None
    kind = type(odd[0])
    return (
        kind.__name__
        if kind not in (Tensor, torch.nn.Parameter)
        else "a batched, functional or zero tensor, or a negated view"
    )


def current_stream(device: torch.device) -> int:
    """The stream to which work for the device is submitted now; 0 where there is none.

    >>> current_stream(torch.device("cpu"))
    0
    """
    if device.type != "cuda":
        return 0
    # What `torch.cuda.current_stream` asks too, without an object around it: decoding waits for this.
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportAttributeAccessIssue]


def delay(cycles: int) -> None:
    """Keeps the current stream of the current CUDA device busy for that many cycles, without making the host wait.

    >>> if torch.cuda.is_available():
    ...     delay(1)
    """
    torch.cuda._sleep(cycles)


def openmp_team() -> int:
    """The address at which torch's own OpenMP runs a team of threads; 0 where it has none.

    It is looked up behind torch's library, so that it is the copy that torch loaded, under whatever name.

    >>> isinstance(openmp_team(), int)
    True
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if os.name != "posix" or not path.exists():
        return 0
    entry = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
    return ctypes.cast(entry, ctypes.c_void_p).value or 0 if entry is not None else 0


def view_base(x: Tensor) -> Tensor:
    """The tensor of which x is a view, or x itself.

    >>> x = torch.ones(2)
    >>> view_base(x[:1]) is x
    True
    """
    return x if x._base is None else x._base


_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_FIXED_VIEWS = {
    _autograd.CreationMeta.MULTI_OUTPUT_NODE: "one of several views that one function returned, such as "
    "unbind, split or chunk",
    _autograd.CreationMeta.NO_GRAD_MODE: "a view that was made under torch.no_grad",
    _autograd.CreationMeta.INFERENCE_MODE: "a view that was made in inference mode",
    _autograd.CreationMeta.IN_CUSTOM_FUNCTION: "a view that an autograd.Function returned",
}


def why_view_is_fixed(x: Tensor) -> str | None:
    """Why autograd does not let a view be written where a gradient is needed, in words; None if it does.

    >>> x = torch.ones(2, 3, requires_grad=True) * 2
    >>> why_view_is_fixed(x[0]) is None, why_view_is_fixed(x.unbind(0)[0])[:20]
    (True, 'one of several views')
    """
    return _FIXED_VIEWS.get(_autograd._get_creation_meta(x)) if x._is_view() else None


_Made = TypeVar("_Made", bound=Callable[..., object])


def constant_to_compiler(function: _Made) -> _Made:
    """`torch.compiler.assume_constant_result`, which imports the whole compiler: seconds that only compiling may cost.

    >>> @constant_to_compiler
    ... def two() -> int:
    ...     return 2
    >>> two()
    2
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def fake_mode() -> FakeTensorMode | None:
    """The mode that makes fake tensors of what is computed now, or None; None to a compiler, which has its own.

    >>> fake_mode() is None
    True
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        return None
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if isinstance(mode, FakeTensorMode) else None


@contextmanager
def outside_modes() -> Iterator[None]:
    """A context in which no mode, such as fake tensors, and no transform of torch.func sees what is computed.

    >>> with FakeTensorMode(), outside_modes():
    ...     type(torch.ones(1)).__name__
    'Tensor'
    """
    modes, transforms = torch._C._len_torch_dispatch_stack() > 0, torch._C._are_functorch_transforms_active()
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes() if modes else nullcontext(),
        temporarily_clear_interpreter_stack() if transforms else nullcontext(),
    ):
        yield
