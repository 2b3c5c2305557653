"""The calls that compare_commits.py times. They use only names that both checkouts export."""

import importlib
import inspect
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = Callable[[], object]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@dataclass(frozen=True)
class Case:
    """A call to time.

    Attributes:
        name: The name of the case.
        make: Builds the tensors and returns the call.
        grad: Whether autograd is enabled.
        host_only: Whether only host time is measured.
    """

    name: str
    make: Callable[[], Call]
    grad: bool = False
    host_only: bool = False


class Suite:
    """The cases of one device, in the order in which they are timed."""

    def __init__(self, device: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.rw: Any = importlib.import_module("ropewalk")
        self.device = device
        parameters = list(inspect.signature(self.rw.qk_norm_rope).parameters)
        self.rope_is_third = parameters[2] == "rope"

    def cases(self) -> list[Case]:
        """All cases of the device."""
        return [*(self._cpu() if self.device == "cpu" else self._gpu())]

    # Building blocks of cases.

    def rope(self, dim: int, pairing: str, backend: str | None = None, rotary_dim: int | None = None) -> Any:
        """A module on the device."""
        spec = self.rw.RopeSpec(dim, rotary_dim=rotary_dim, pairing=pairing)
        return self.rw.RotaryEmbedding(spec, backend=backend).to(self.device)

    def tensors(self, shape: Sequence[int], memory: str, dtype: str, count: int = 2) -> list[Any]:
        """q and k for (batch, seq, q heads, k heads, dim), as [batch, heads, seq, dim]."""
        batch, seq, q_heads, k_heads, dim = shape
        random = self.torch.Generator(self.device).manual_seed(0)
        heads = [q_heads, k_heads][:count]
        drawn = [self.torch.randn(batch, seq, h, dim, generator=random, device=self.device) for h in heads]
        views = [x.to(getattr(self.torch, dtype)).transpose(1, 2) for x in drawn]
        return views if memory == "transposed" else [x.contiguous() for x in views]

    def ids(self, positions: range) -> Any:
        """The positions as a tensor on the device."""
        return self.torch.arange(positions.start, positions.stop, device=self.device)

    def norm(self, q: Any, k: Any, weights: Sequence[Any], rope: Any, **position: Any) -> Any:
        """qk_norm_rope, whose argument order differs between checkouts."""
        if self.rope_is_third:
            return self.rw.qk_norm_rope(q, k, rope, q_weight=weights[0], k_weight=weights[1], **position)
        return self.rw.qk_norm_rope(q, k, weights[0], weights[1], rope, **position)

    def backward(self, forward: Callable[..., Any], leaves: Sequence[Any]) -> Call:
        """The call that computes forward and the gradients of all leaves."""
        for leaf in leaves:
            leaf.requires_grad_()
        with self.torch.enable_grad():
            outputs = forward()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        cotangents = [self.torch.ones_like(y) for y in outputs]
        grad = self.torch.autograd.grad

        def call() -> object:
            result = forward()
            return grad(result if isinstance(result, tuple) else (result,), leaves, cotangents)

        return call

    def rotation(
        self,
        shape: Sequence[int],
        pairing: str,
        memory: str,
        dtype: str,
        work: str = "forward",
        position_argument: str = "angles",
        rotary_dim: int | None = None,
        norm: bool = False,
        backend: str | None = None,
        in_place: bool = False,
        compiled: bool = False,
    ) -> Callable[[], Call]:
        """The function that builds a rotation. `position_argument` is the argument that specifies the positions."""

        def make() -> Call:
            positions = range(shape[1]) if shape[1] > 1 else range(1000, 1001)
            rope = self.rope(shape[-1], pairing, backend, rotary_dim)
            tensors = self.tensors(shape, memory, dtype)
            arguments: dict[str, Any] = {
                "nothing": lambda: {},
                "offset": lambda: {"offset": positions.start},
                "offsets": lambda: {"offset": self.torch.full((shape[0],), positions.start, device=self.device)},
                "positions": lambda: {"positions": self.ids(positions)},
                "angles": lambda: {"angles": rope.at(self.ids(positions))},
            }[position_argument]()
            q, k = tensors
            if norm:
                random = self.torch.Generator(self.device).manual_seed(1)
                weights = [
                    (self.torch.rand(shape[-1], generator=random, device=self.device) + 0.5).to(q.dtype)
                    for _ in range(2)
                ]
                tensors = [*tensors, *weights]

                def rotate(q: Any, k: Any) -> Any:
                    return self.norm(q, k, weights, rope, **arguments)
            elif in_place:

                def rotate(q: Any, k: Any) -> Any:
                    return rope.rotate_(q, k, **arguments)
            else:

                def rotate(q: Any, k: Any) -> Any:
                    return rope(q, k, **arguments)

            function = self.torch.compile(rotate, dynamic=False) if compiled else rotate
            if work == "forward":
                return lambda: function(q, k)
            if work == "forward, grad":
                for x in tensors:
                    x.requires_grad_()
                return lambda: function(q, k)
            return self.backward(lambda: function(q, k), tensors)

        return make

    def linear(self, shape: Sequence[int], dtype: str, work: str, rotated: bool) -> Callable[[], Call]:
        """The function that builds a call of linear attention on q, k, v of (batch, heads, seq, dim)."""

        def make() -> Call:
            random = self.torch.Generator(self.device).manual_seed(0)
            q, k, v = (
                self.torch.randn(shape, generator=random, device=self.device).to(getattr(self.torch, dtype))
                for _ in range(3)
            )
            rope = self.rw.RotaryEmbedding(shape[-1]).to(self.device) if rotated else None

            def attend() -> Any:
                return self.rw.linear_attention(q, k, v, rope=rope)

            return attend if work == "forward" else self.backward(attend, [q, k, v])

        return make

    def linear_step(self, dtype: str) -> Callable[[], Call]:
        """The function that builds a call for one token after a state."""

        def make() -> Call:
            random = self.torch.Generator(self.device).manual_seed(0)
            q, k, v = (
                self.torch.randn(1, 8, 65, 64, generator=random, device=self.device).to(getattr(self.torch, dtype))
                for _ in range(3)
            )
            rope = self.rw.RotaryEmbedding(64).to(self.device)
            before = [x[:, :, :64] for x in (q, k, v)]
            _, state = self.rw.linear_attention(*before, rope=rope, return_state=True)
            last = [x[:, :, 64:].contiguous() for x in (q, k, v)]
            return lambda: self.rw.linear_attention(*last, rope=rope, state=state, return_state=True)

        return make

    def angles(self, seq: int) -> Callable[[], Call]:
        """The function that builds a call of rope.at."""

        def make() -> Call:
            rope, ids = self.rope(128, "half"), self.ids(range(1000, 1000 + seq))
            return lambda: rope.at(ids)

        return make

    def new_module(self) -> Call:
        """A call that creates a module and calls it once."""
        q, k = self.tensors((1, 16, 4, 2, 64), "contiguous", "float32")
        return lambda: self.rw.RotaryEmbedding(64).to(self.device)(q, k)

    def layer(self, name: str, linear: bool) -> Callable[[], Call]:
        """The function that builds a forward pass of an attention layer."""

        def make() -> Call:
            self.torch.manual_seed(0)
            encoding = self.rw.encoding(name, dim=512, num_heads=8)
            kind = self.rw.LinearAttention if linear else self.rw.Attention
            layer = kind(512, num_heads=8, encoding=encoding).to(self.device)
            x = self.torch.randn(1, 128, 512, device=self.device)
            return lambda: layer(x)

        return make

    def specs(self, as_file: bool) -> Callable[[], Call]:
        """The function that builds a call of load_spec on a config of Llama 3.1."""

        def make() -> Call:
            if not as_file:
                return lambda: self.rw.load_spec(LLAMA)
            path = Path(tempfile.mkdtemp()) / "config.json"
            path.write_text(json.dumps(LLAMA), encoding="utf-8")
            return lambda: self.rw.load_spec(str(path))

        return make

    def seed_function(self) -> Call:
        """A call of apply_rope, the function of the seeds."""
        cos, sin = self.rw.build_rotary_frequencies(128, 2048)
        (q,) = self.tensors((1, 2048, 32, 8, 128), "contiguous", "float32", count=1)
        cos, sin = cos.to(self.device), sin.to(self.device)
        return lambda: self.rw.apply_rope(q, cos, sin)

    # The cases of each device.

    def _cpu(self) -> Iterator[Case]:
        prefill, token = (1, 2048, 32, 8, 128), (1, 1, 32, 8, 128)
        dtypes, pairings = ("float32", "bfloat16"), ("half", "interleaved")
        memories = ("transposed", "contiguous")
        for work, dtype, pairing, memory in itertools.product(
            ("forward", "forward+backward"), dtypes, pairings, memories
        ):
            make = self.rotation(prefill, pairing, memory, dtype, work, "offset")
            yield Case(f"prefill 2048, {dtype}, {pairing}, {memory}, {work}", make, work != "forward")
        for work, dtype, pairing in itertools.product(("forward", "forward, grad"), dtypes, pairings):
            make = self.rotation(token, pairing, "contiguous", dtype, work, "offset")
            yield Case(f"token, {dtype}, {pairing}, offset=, {work}", make, work != "forward")
        for pairing, work in itertools.product(pairings, ("forward", "forward+backward")):
            make = self.rotation(prefill, pairing, "transposed", "float32", work, "offset", backend="torch")
            yield Case(f"prefill 2048, float32, {pairing}, backend torch, {work}", make, work != "forward")
        for position_argument in ("nothing", "offsets", "positions", "angles"):
            make = self.rotation(token, "half", "contiguous", "float32", position_argument=position_argument)
            yield Case(f"token, float32, half, {position_argument}=", make)
        for position_argument in ("positions", "angles"):
            make = self.rotation(prefill, "half", "transposed", "bfloat16", position_argument=position_argument)
            yield Case(f"prefill 2048, bfloat16, half, {position_argument}=", make)
        for name, shape in (("token", token), ("prefill 2048", prefill)):
            make = self.rotation(shape, "half", "contiguous", "float32", position_argument="offset", in_place=True)
            yield Case(f"{name}, float32, half, rotate_", make)
            for work in ("forward", "forward+backward"):
                make = self.rotation(shape, "half", "contiguous", "float32", work, "offset", norm=True)
                yield Case(f"{name}, float32, half, qk_norm_rope, {work}", make, work != "forward")
            make = self.rotation(shape, "half", "contiguous", "float32", position_argument="angles", compiled=True)
            yield Case(f"{name}, float32, half, angles=, compiled", make)
        make = self.rotation(token, "half", "contiguous", "float32", position_argument="nothing", compiled=True)
        yield Case("token, float32, half, positions 0.., compiled", make)
        make = self.rotation(prefill, "half", "contiguous", "float32", "forward+backward", "angles", compiled=True)
        yield Case("prefill 2048, float32, half, angles=, compiled, forward+backward", make, grad=True)
        for seq, work, rotated in itertools.product((64, 1024), ("forward", "forward+backward"), (False, True)):
            make = self.linear((1, 8, seq, 64), "float32", work, rotated)
            yield Case(f"linear {seq}, float32{', rope' if rotated else ''}, {work}", make, work != "forward")
        yield Case("linear, one token after a state, rope", self.linear_step("float32"))
        yield Case("linear 8192, float32, rope, forward", self.linear((1, 8, 8192, 64), "float32", "forward", True))
        yield from self._shared()

    def _shared(self) -> Iterator[Case]:
        """Cases for which only host time is measured."""
        yield Case("rope.at, 1 position", self.angles(1), host_only=True)
        yield Case("rope.at, 2048 positions", self.angles(2048), host_only=True)
        yield Case("new module, first call", self.new_module, host_only=True)
        yield Case("load_spec, dict", self.specs(as_file=False), host_only=True)
        yield Case("load_spec, file", self.specs(as_file=True), host_only=True)
        for name in ("rope", "alibi"):
            yield Case(f"Attention, {name}, forward", self.layer(name, linear=False), host_only=True)
        yield Case("LinearAttention, rope, forward", self.layer("rope", linear=True), host_only=True)
        yield Case("apply_rope, 2048 tokens", self.seed_function, host_only=True)

    def _gpu(self) -> Iterator[Case]:
        training, long = (4, 8192, 32, 8, 128), (1, 131_072, 32, 8, 128)
        small, token = (8, 2048, 16, 16, 64), (64, 1, 32, 8, 128)
        pairings, memories, works = (
            ("half", "interleaved"),
            ("transposed", "contiguous"),
            ("forward", "forward+backward"),
        )
        for shape, pairing, memory in itertools.product((training, long, small), pairings, memories):
            yield Case(f"{shape}, {pairing}, {memory}", self.rotation(shape, pairing, memory, "bfloat16"))
        for pairing in pairings:
            make = self.rotation(training, pairing, "transposed", "bfloat16", rotary_dim=64)
            yield Case(f"{training}, {pairing}, 64 features rotated", make)
        for dim, pairing in itertools.product((96, 80), pairings):
            shape = (*training[:4], dim)
            yield Case(f"{shape}, {pairing}", self.rotation(shape, pairing, "transposed", "bfloat16"))
        for dtype in ("float32", "float16"):
            yield Case(f"{training}, half, {dtype}", self.rotation(training, "half", "transposed", dtype))
        make = self.rotation(training, "half", "transposed", "bfloat16", position_argument="positions")
        yield Case(f"{training}, half, positions=", make)
        make = self.rotation(training, "half", "transposed", "bfloat16", position_argument="nothing")
        yield Case(f"{training}, half, positions 0..", make)
        for shape, pairing, memory in itertools.product((training, small), pairings, memories):
            make = self.rotation(shape, pairing, memory, "bfloat16", "forward+backward")
            yield Case(f"{shape}, {pairing}, {memory}, forward+backward", make, grad=True)
        for work, pairing, memory in itertools.product(works, pairings, memories):
            make = self.rotation(training, pairing, memory, "bfloat16", work, norm=True)
            yield Case(f"{training}, {pairing}, {memory}, qk_norm_rope, {work}", make, work != "forward")
        for pairing, position_argument in itertools.product(pairings, ("offset", "offsets", "positions", "angles")):
            make = self.rotation(token, pairing, "contiguous", "bfloat16", position_argument=position_argument)
            yield Case(f"token {token}, {pairing}, {position_argument}=", make)
        make = self.rotation(token, "half", "contiguous", "bfloat16", "forward, grad", "offset")
        yield Case(f"token {token}, half, offset=, with grad", make, grad=True)
        make = self.rotation(token, "half", "contiguous", "bfloat16", "forward+backward", "offset")
        yield Case(f"token {token}, half, offset=, forward+backward", make, grad=True)
        for shape, name in ((token, "token "), (training, "")):
            make = self.rotation(shape, "half", "contiguous", "bfloat16", position_argument="offset", in_place=True)
            yield Case(f"{name}{shape}, half, rotate_", make)
            make = self.rotation(shape, "half", "contiguous", "bfloat16", compiled=True)
            yield Case(f"{name}{shape}, half, angles=, compiled", make)
        make = self.rotation(training, "half", "transposed", "bfloat16", "forward+backward", compiled=True)
        yield Case(f"{training}, half, angles=, compiled, forward+backward", make, grad=True)
        for work in works:
            make = self.rotation(token, "half", "contiguous", "bfloat16", work, "offset", norm=True)
            yield Case(f"token {token}, half, qk_norm_rope, {work}", make, work != "forward")
        for shape, work, rotated in itertools.product(
            ((1, 16, 1024, 64), (4, 16, 8192, 128), (1, 16, 65_536, 64)), works, (False, True)
        ):
            make = self.linear(shape, "bfloat16", work, rotated)
            yield Case(f"linear {shape}{', rope' if rotated else ''}, {work}", make, work != "forward")
        yield Case("linear, one token after a state, rope", self.linear_step("bfloat16"))
        yield from self._shared()
