"""The state of torch around a call: compilers, exporters, transforms, streams.

No other file uses torch's private APIs. Kernels accept only plain tensors in eager calls that nothing traces,
transforms or intercepts. The functions of this module detect such calls.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.autograd import profiler as _profiler
from torch.nn.modules import module as _modules
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TENSOR_METHODS",
    "TORCH_FUNCTIONS",
    "TORCH_STATE",
    "TorchDispatchMode",
    "call_with_tensors",
    "calls_forward",
    "compiling_frames",
    "constant_to_compiler",
    "current_device",
    "current_stream",
    "delay",
    "fake_mode",
    "has_hooks",
    "is_capturing",
    "is_eager",
    "is_exporting",
    "is_masked",
    "is_one",
    "is_plain",
    "is_traced",
    "is_transformed",
    "openmp_team",
    "outside_modes",
    "own_parameters",
    "own_tensors",
    "plain_apply",
    "skip_frames",
    "timeout_of",
    "version_of",
    "view_base",
    "was_distributed",
    "why_not_plain",
    "why_view_is_fixed",
]

# The original torch.zeros, torch.tensor and so on, even if a library has replaced the public names.
TORCH_FUNCTIONS: Any = torch._C._VariableFunctions  # pyright: ignore[reportAttributeAccessIssue]
# The original Tensor.new_zeros and so on.
TENSOR_METHODS = torch._C.TensorBase

_Parameter = torch.nn.Parameter
# Tracers replace it.
_Module = torch.nn.Module
_module_call = _Module.__call__
# Returns what torch.compile does with the frames of functions that are called now; None if it does nothing.
compiling_frames: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore[reportAttributeAccessIssue]
_is_zerotensor = torch._is_zerotensor  # pyright: ignore[reportPrivateImportUsage]
_is_functional_tensor = torch._is_functional_tensor  # pyright: ignore[reportPrivateImportUsage]

# What the C kernel asks torch: the number of threads; whether a tensor is a negated view (it detects tensors without
# memory by itself); whether a graph is built, and whether inference mode is active; a function that increments the
# versions of tensors; functions that return something true if a call is transformed, intercepted or traced; and the
# namespace with the level of forward-mode differentiation.
TORCH_STATE: tuple[Any, ...] = (
    torch.get_num_threads,
    Tensor.is_neg,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch._C._increment_version,
    (torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state),
    vars(forward_ad),
)


Returned = TypeVar("Returned")


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether the module has hooks, which run in addition to its forward.

    >>> has_hooks(torch.nn.Identity())
    False
    """
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks)


def own_tensors(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters and buffers of a module itself, by name. Those registered as None are None.

    >>> list(own_tensors(torch.nn.Linear(2, 3)))
    ['weight', 'bias']
    """
    return {**module._parameters, **module._buffers}


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` for plain tensors in eager calls, without its wrapper for torch.func, which takes longer.

    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    >>> plain_apply(Double)(torch.ones(1)).item()
    2.0
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def was_distributed(module: torch.nn.Module) -> bool:
    """Whether torch's `distribute_module` or `parallelize_module` made the parameters of a module DTensors.

    >>> was_distributed(torch.nn.Identity())
    False
    """
    return bool(getattr(module, "_distribute_module_applied", False))


# Held while parameters are replaced: other threads must not see them, nor restore theirs in between.
_REPLACING = threading.RLock()


def call_with_tensors(
    replaced: Sequence[tuple[torch.nn.Module, str, Tensor]],
    run: Callable[..., Returned],
    *arguments: Any,
    **options: Any,
) -> Returned:
    """Call a function in which modules have other tensors as parameters and buffers.

    `torch.func.functional_call` does the same for one module, which a compiler must not create in a graph. Other
    threads wait.

    Args:
        replaced: Modules, names of their parameters or buffers, and the other tensors.
        run: The function.
        arguments: Its arguments.
        options: Its options.

    >>> layer = torch.nn.Linear(1, 1, bias=False)
    >>> call_with_tensors([(layer, "weight", torch.tensor([[2.0]]))], layer, torch.tensor([3.0])).item()
    6.0
    """
    if not replaced:
        return run(*arguments, **options)
    if torch.compiler.is_compiling():
        return _call_with_tensors(replaced, run, *arguments, **options)
    with _REPLACING:
        return _call_with_tensors(replaced, run, *arguments, **options)


def _call_with_tensors(
    replaced: Sequence[tuple[torch.nn.Module, str, Tensor]],
    run: Callable[..., Returned],
    *arguments: Any,
    **options: Any,
) -> Returned:
    places: list[Any] = [
        module._parameters if name in module._parameters else module._buffers for module, name, _ in replaced
    ]
    own = [place[name] for place, (_, name, _) in zip(places, replaced, strict=True)]
    try:
        for place, (_, name, other) in zip(places, replaced, strict=True):
            place[name] = other
        return run(*arguments, **options)
    finally:
        for place, (_, name, _), tensor in zip(places, replaced, own, strict=True):
            place[name] = tensor


def calls_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether an eager call of the module runs this forward and nothing else: no hooks, no trace, no other forward.

    Profilers and tracers see calls of modules in nn.Module, which must not be bypassed then.

    >>> calls_forward(torch.nn.Identity(), torch.nn.Identity.forward)
    True
    >>> module = torch.nn.Identity()
    >>> handle = module.register_forward_hook(lambda *_: None)
    >>> calls_forward(module, torch.nn.Identity.forward)
    False
    """
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _modules._global_forward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_backward_hooks
        or _modules._global_backward_pre_hooks
        or module._compiled_call_impl is not None
        or _Module.__call__ is not _module_call
        or _profiler._is_profiler_enabled
        or type(module).forward is not forward
        or "forward" in module.__dict__
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors in an eager call that nothing traces, transforms or intercepts.

    >>> is_plain(torch.ones(2)), torch.func.vmap(lambda x: torch.tensor(is_plain(x)))(torch.ones(1)).item()
    (True, False)
    """
    if not is_eager():
        return False
    # The conditions of `is_masked`, inlined: this function adds to the latency of decoding.
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


def is_traced(x: Tensor) -> bool:
    """Whether a compiler traces a call with this tensor. `torch.compiler.is_compiling` is not always true in backward.

    >>> is_traced(torch.ones(2))
    False
    """
    return torch.compiler.is_compiling() or isinstance(x, FunctionalTensor)


def is_eager() -> bool:
    """Whether nothing traces, transforms or intercepts the current call.

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

    Batched tensors of `is_grads_batched`, zero tensors and functional tensors have no memory. The imaginary part of a
    conjugate is stored with opposite signs.

    >>> is_masked(torch.ones(1)), is_masked(torch.ones(1, dtype=torch.complex64).conj().imag)
    (False, True)
    """
    return is_legacy_batchedtensor(x) or x.is_neg() or _is_zerotensor(x) or _is_functional_tensor(x)


def is_transformed() -> bool:
    """Whether functorch or forward-mode differentiation is active.

    >>> is_transformed()
    False
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_exporting() -> bool:
    """Whether torch.export is active.

    It reads the flag, because `torch.compiler.is_exporting` of torch 2.11 returns True in every compilation.

    >>> is_exporting()
    False
    """
    return torch.compiler._is_exporting_flag


def is_one(length: Any) -> bool:
    """Whether the compiler knows that a length is 1. It does not guard on lengths that depend on data.

    >>> is_one(1), is_one(2)
    (True, False)
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(length == 1)


def why_not_plain(*tensors: Tensor | None) -> str | None:
    """Return the reason why a kernel cannot read these tensors, or None.

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
    unsupported = [tensor for tensor in tensors if tensor is not None and not _is_ordinary(tensor)]
    if not unsupported:
        return None
    kind = type(unsupported[0])
    return (
        kind.__name__
        if kind not in (Tensor, torch.nn.Parameter)
        else "a batched, functional or zero tensor, or a negated view"
    )


def current_stream(device: torch.device) -> int:
    """Return the current CUDA stream of the device, and 0 for other devices.

    >>> current_stream(torch.device("cpu"))
    0
    """
    if device.type != "cuda":
        return 0
    # As `torch.cuda.current_stream`, without creating an object: this adds to the latency of decoding.
    return torch._C._cuda_getCurrentRawStream(device.index)  # pyright: ignore[reportAttributeAccessIssue]


def current_device() -> int:
    """Return the index of the current CUDA device, which must be initialized; -1 without CUDA.

    >>> torch.cuda.is_available() or current_device() == -1
    True
    """
    return _get_device()


# As `torch.cuda.current_device`, without its checks: this adds to the latency of decoding.
_get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


def is_capturing(stream: int) -> bool:
    """Whether a stream, the current one of the current CUDA device, records a graph. The default stream, 0, cannot.

    >>> is_capturing(0)
    False
    """
    return stream != 0 and torch.cuda.is_current_stream_capturing()


def delay(cycles: int) -> None:
    """Keep the current stream of the current CUDA device busy for `cycles` cycles, without blocking the host.

    >>> if torch.cuda.is_available():
    ...     delay(1)
    """
    torch.cuda._sleep(cycles)


def openmp_team() -> int:
    """Return the address of GOMP_parallel in the OpenMP library that torch uses, and 0 if there is none.

    The symbol is looked up through torch's library, so that it belongs to the copy of OpenMP that torch has loaded.

    >>> isinstance(openmp_team(), int)
    True
    """
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if os.name != "posix" or not path.exists():
        return 0
    entry = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
    return ctypes.cast(entry, ctypes.c_void_p).value or 0 if entry is not None else 0


def version_of(x: Tensor) -> int:
    """Return how often a tensor was written to, as autograd counts it. Inference tensors have no such number.

    >>> x = torch.ones(2)
    >>> before = version_of(x)
    >>> _ = x.mul_(2)
    >>> version_of(x) - before
    1
    """
    return x._version


def skip_frames(function: Callable[..., Any]) -> None:
    """Let torch.compile skip frames of a function, as it skips those of nn.Module: what they call is compiled.

    A function that a compiled one calls is still inlined.

    >>> skip_frames(lambda: None)
    """
    frames = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    actions = frames._FrameAction
    strategy = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)


def view_base(x: Tensor) -> Tensor:
    """Return the tensor of which x is a view, or x itself.

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
    """Return the reason why autograd does not allow in-place writes to a view that needs a gradient, or None.

    >>> x = torch.ones(2, 3, requires_grad=True) * 2
    >>> why_view_is_fixed(x[0]) is None, why_view_is_fixed(x.unbind(0)[0])[:20]
    (True, 'one of several views')
    """
    return _FIXED_VIEWS.get(_autograd._get_creation_meta(x)) if x._is_view() else None


_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_to_compiler(function: _Function) -> _Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler, which takes seconds.

    >>> @constant_to_compiler
    ... def two() -> int:
    ...     return 2
    >>> two()
    2
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def fake_mode() -> FakeTensorMode | None:
    """Return the active fake tensor mode, or None. It is None under torch.compile, which has its own fake tensors.

    >>> fake_mode() is None
    True
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0:
        return None
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode if isinstance(mode, FakeTensorMode) else None


@contextmanager
def outside_modes() -> Iterator[None]:
    """Context in which dispatch modes, such as fake tensors, and transforms of torch.func are disabled.

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


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """Return the dict in which a module stores its own parameters, to replace one by a tensor for a while.

    >>> list(own_parameters(torch.nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    return module._parameters


def timeout_of(group: Any, device: str) -> timedelta | None:
    """Return the timeout of a process group for tensors on a device, or None if its backend has none.

    >>> import torch.distributed as dist
    >>> wait = timedelta(seconds=20)
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
    >>> timeout_of(dist.group.WORLD, "cpu") == wait
    True
    >>> dist.destroy_process_group()
    """
    options = getattr(group._get_backend(torch.device(device)), "options", None)
    return getattr(options, "_timeout", None)
