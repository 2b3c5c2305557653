"""Linear attention over a sequence that is cut over ranks: the same function as on one rank."""

import itertools
from dataclasses import replace
from typing import Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError, as_int, require_flag, shown
from ropewalk.kernels.constructors import arange, new_zeros, tensor
from ropewalk.kernels.types import Sums
from ropewalk.nn.encodings.base import DistanceBias, Encoding
from ropewalk.nn.encodings.rotary import rope_for_linear, rope_in
from ropewalk.nn.linear.arguments import check_tensors
from ropewalk.nn.linear.feature_maps import FeatureMap, map_name, resolve_maps
from ropewalk.nn.linear.function import LinearOptions
from ropewalk.nn.linear.function import linear_attention as attend_locally
from ropewalk.nn.linear.keys_alone import linear_state
from ropewalk.nn.linear.near_keys import sum_far
from ropewalk.nn.linear.state import LinearState, checked_start, counts_tokens, join_states
from ropewalk.nn.linear.weighting import Tokens, bias_for_linear, checked_decay, resolve_scale
from ropewalk.nn.local_heads import call_locally, check_arguments_of_heads, check_shards_of_heads, dims_of_decay
from ropewalk.nn.position_checks import can_read_values, described
from ropewalk.nn.rotary.embedding import RotaryEmbedding
from ropewalk.ops import require_backend
from ropewalk.ops.dtensors import is_dtensor
from ropewalk.parallel.arguments import (
    check_mesh_of_heads,
    check_positions,
    check_shards,
    check_tokens,
    describe_encoding,
    describe_parameters,
    describe_tensors,
    needs_gradients,
)
from ropewalk.parallel.collectives import no_outputs
from ropewalk.parallel.exchange import Exchange
from ropewalk.parallel.layout import Run
from ropewalk.parallel.shards import Shards
from ropewalk.signatures import checks_names, refuse_arguments

__all__ = ["ParallelLinearOptions", "linear_attention"]

_ASKED = "parallel.linear_attention"


class ParallelLinearOptions(TypedDict, total=False):
    """Keyword arguments of `parallel.linear_attention` except shards and return_state, for type checkers.

    >>> "decay" in ParallelLinearOptions.__annotations__
    True
    """

    rope: RotaryEmbedding | Encoding | None
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap]
    causal: bool
    decay: Tensor | None
    bias: Encoding | None
    normalize: bool
    scale: float | None
    state: LinearState | None
    length: int | None
    backend: str | None


@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shards: Shards,
    return_state: Literal[False] = False,
    **options: Unpack[ParallelLinearOptions],
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shards: Shards,
    return_state: Literal[True],
    **options: Unpack[ParallelLinearOptions],
) -> tuple[Tensor, LinearState]: ...
@checks_names
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *unnamed: Never,
    shards: Shards,
    rope: RotaryEmbedding | Encoding | None = None,
    feature_map: FeatureMap | tuple[FeatureMap, FeatureMap] = "elu",
    causal: bool = True,
    decay: Tensor | None = None,
    bias: Encoding | None = None,
    normalize: bool = True,
    scale: float | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    length: int | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, LinearState]:
    """`ropewalk.linear_attention` over all tokens of all ranks.

    Each rank computes the state of its keys (`linear_state`), and one all-gather exchanges the states. Each rank merges
    those of the tokens before its own, and computes its outputs from them. Keys are rotated at the positions of their
    tokens in the whole sequence, so a state is read on any rank as it is. The backward pass has one reduce-scatter.
    What is sent does not depend on the number of tokens.

    Gradients of parameters (learned frequencies, T5's numbers) and of `state` are the share of this rank: their sum
    over ranks is the gradient on one rank.

    Args:
        q: Queries of this rank [batch, heads, tokens, dim]. Tensors can be DTensors that another mesh cuts along batch
            or heads. Tokens are always those of this rank.
        k: Keys of this rank [batch, kv_heads, tokens, dim].
        v: Values of this rank [batch, kv_heads, tokens, v_dim].
        shards: Which tokens each rank has.
        rope: As in `ropewalk.linear_attention`.
        feature_map: As in `ropewalk.linear_attention`.
        causal: Hide the keys after a query. Otherwise there can be no decay and no bias.
        decay: As in `ropewalk.linear_attention`: one number per head, or one per token of this rank.
        bias: As in `ropewalk.linear_attention`.
        normalize: As in `ropewalk.linear_attention`.
        scale: As in `ropewalk.linear_attention`.
        state: State before the first token of each sequence, the same on all ranks; or None.
        return_state: Also return the state after the last token of each sequence, on every rank. If every rank computes
            the same loss of it, divide that loss by the number of ranks.
        length: Length for rules that depend on it. By default that of the encoding, or the number of tokens of all
            ranks and of the state.
        backend: Force a backend; None chooses one.

    Returns:
        Tensor [batch, heads, tokens, v_dim], or a tuple of it and a `LinearState`.

    Raises:
        RopewalkError: On every rank, if an argument of some rank is invalid, or differs between ranks.

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> store = dist.HashStore()
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> shards = Shards(init_device_mesh("cpu", (1,)), 3)
    >>> x, v = torch.zeros(1, 1, 3, 2), torch.tensor([[[[1.0], [3.0], [5.0]]]])
    >>> linear_attention(x, x, v, shards=shards).flatten().tolist()  # equal features: the mean of the visible values
    [1.0, 2.0, 3.0]
    >>> dist.destroy_process_group()
    """
    check_shards(shards, asked=_ASKED)
    if unnamed or unknown:
        # On all ranks, as errors of other arguments.
        shards.agree(lambda: refuse_arguments(_ASKED, linear_attention, unnamed, unknown), lambda: "", asked=_ASKED)
    if isinstance(rope, Encoding) and rope.name == "none":
        # It needs no positions, as None.
        rope = None
    if is_dtensor(q) or is_dtensor(k) or is_dtensor(v):
        encodings, tensors = {"rope": rope, "bias": bias}, {"decay": (decay, dims_of_decay(decay))}

        def check_dtensors() -> None:
            check_tensors(q, k, v, causal)
            cut = check_shards_of_heads(q, k, v, asked=_ASKED)
            check_mesh_of_heads(cut, shards, asked=_ASKED)
            check_arguments_of_heads(cut, encodings, tensors, asked=_ASKED)

        # Before anything else, so that an error of one rank is one of all.
        shards.agree(check_dtensors, lambda: "DTensors", asked=_ASKED)
        return call_locally(
            linear_attention,
            q,
            k,
            v,
            asked=_ASKED,
            encodings=encodings,
            tensors=tensors,
            reads=feature_map if isinstance(feature_map, tuple) else (feature_map,),
            shards=shards,
            feature_map=feature_map,
            causal=causal,
            normalize=normalize,
            scale=scale,
            state=state,
            return_state=return_state,
            length=length,
            backend=backend,
        )
    distances: DistanceBias | None = None

    def check() -> None:
        nonlocal distances
        check_tensors(q, k, v, causal)
        rope_for_linear(rope, f"{_ASKED}(rope=...)")
        check_tokens(q, k, shards, rope, asked=_ASKED)
        _check_options(q, k, shards, causal, decay, bias, state, return_state, length)
        start = 0 if state is None else state.start(len(state.above))
        if not isinstance(start, Tensor):
            check_positions(shards, rope, [start], asked=_ASKED)
        elif can_read_values(start):
            check_positions(shards, rope, [int(x) for x in start.tolist()], asked=_ASKED)
        distances = bias_for_linear(bias, f"{_ASKED}(bias=...)")
        resolve_maps(feature_map, _ASKED)
        resolve_scale(normalize, scale, _ASKED)
        require_backend(backend)
        # Otherwise all ranks compute outputs, and raise the same errors. A compiled call has tokens on every rank.
        incomplete = 0 in shards.lengths or (state is not None and len(state.above) > 0)
        if shards.check_calls and incomplete and not torch.compiler.is_compiling():
            given: LinearOptions = {
                "rope": rope,
                "feature_map": feature_map,
                "causal": causal,
                "decay": decay,
                "bias": bias,
                "normalize": normalize,
                "scale": scale,
                "length": _length(rope, shards, state, length),
            }
            _check_as_one_rank(q, k, v, shards, state, given)

    def describe() -> str:
        maps = [
            f"{x!r}, parameters {describe_parameters(x)}" if isinstance(x, nn.Module) else map_name(x)
            for x in resolve_maps(feature_map, _ASKED)
        ]
        options = {
            "feature maps": maps,
            "causal": causal,
            "decay": None if decay is None else (decay.dim(), decay.shape[-2:][0], decay.dtype, needs_gradients(decay)),
            "bias": describe_encoding(bias),
            "normalize, scale": (normalize, scale),
            "state": _described_state(state),
            "return_state": return_state,
            "length": length,
            "backend": backend,
        }
        texts = [f"{name} {value}" for name, value in options.items()]
        return "; ".join(["linear attention", *describe_tensors(q, k, v), describe_encoding(rope), *texts])

    shards.agree(check, describe, asked=_ASKED)
    rotation, rows = rope_in(rope), _Rows(shards, k, alone=distances is not None and distances.numbers is not None)
    starts = _starts(state, rows.sequences(shards.local))
    length = _length(rope, shards, state, length)
    decay = rows.split(decay, 2) if decay is not None and decay.dim() == 3 else decay
    q_rows, k_rows, v_rows = (rows.split(x, 2) for x in (q, k, v))
    ids = rows.positions(starts) if rope is not None or bias is not None else None
    # Not LinearOptions(...), which torch.compile cannot trace.
    options: LinearOptions = {
        "rope": rope,
        "feature_map": feature_map,
        "bias": bias,
        "decay": decay,
        "length": length,
        "backend": backend,
        "cu_seqlens": rows.cu_seqlens,
    }
    mine = rows.state(k_rows, v_rows, ids, options)
    if rotation is not None and rotation.spec.varies:
        # A rank without tokens has rotated no key, but the states that it returns have.
        mine = replace(mine, length=length)
    whole = None
    if mine.near is not None:
        whole = sum_far(mine.near, Sums(mine.above, mine.below), mine.feature_map, rotation, length)
    exchange = Exchange(shards, mine, whole, batch=rows.batch, causal=causal, every=return_state)
    origin: int | Tensor = 0 if counts_tokens(mine) else starts
    if shards.local:
        before = exchange.before(shards.local, origin, rotation, length)
        before = _after_initial(state, before, rows.sequences(shards.local), rope)
        reading: LinearOptions = {**options, "causal": causal, "normalize": normalize, "scale": scale}
        out = rows.join(rows.attend(q_rows, k_rows, v_rows, before, reading))
    else:
        modules = [x for x in (rope, bias, *resolve_maps(feature_map, _ASKED)) if isinstance(x, nn.Module)]
        others = [x for module in modules for x in module.parameters()]
        others += [] if decay is None else [decay]
        others += [] if state is None else _sums_of(state)
        out = no_outputs(q, k, v, *others)
    out = exchange.attach(out)
    if not return_state:
        return out
    ends = _ends(shards)
    origin = 0 if counts_tokens(mine) else _starts(state, rows.sequences(ends))
    after = replace(exchange.before(ends, origin, rotation, length), first=0)
    return out, _after_initial(state, after, rows.sequences(ends), rope)


class _Rows:
    """Runs of a rank as rows of a batch, as packed sequences, or one after the other.

    Args:
        shards: The shards.
        k: Keys of this rank.
        alone: Whether packed runs are computed one after the other, because each has its own near keys.
    """

    def __init__(self, shards: Shards, k: Tensor, *, alone: bool) -> None:
        self.batch, self._runs, self._device = len(k), shards.local, k.device
        self._packed = shards.sequences is not None
        self._alone = alone and self._packed and bool(self._runs)
        packed = self._packed and bool(self._runs)
        # Runs of zigzag without packing have one length.
        self._splits = not self._packed and len(self._runs) > 1
        self._positions = shards.positions.to(k.device)
        self.cu_seqlens: Tensor | None = None
        if packed:
            ends = [0, *(run.offset + run.length for run in self._runs)]
            self.cu_seqlens = tensor(ends, dtype=torch.int64, device=k.device)

    def state(self, k: Tensor, v: Tensor, ids: Tensor | None, options: LinearOptions) -> LinearState:
        """Return the states of all runs."""
        if not self._alone:
            return linear_state(k, v, **{**options, "positions": ids})
        states: list[LinearState] = []
        for part in self._parts():
            positions = None if ids is None else ids[part]
            given = {**options, "positions": positions, "cu_seqlens": None}
            states.append(linear_state(k[:, :, part], v[:, :, part], **given))
        return join_states(states)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, before: LinearState, options: LinearOptions) -> Tensor:
        """Return the outputs of all runs."""
        if not self._alone:
            return attend_locally(q, k, v, **{**options, "state": before})
        outputs: list[Tensor] = []
        for row, part in enumerate(self._parts()):
            state = before.reorder(arange(row, row + 1, device=self._device))
            given = {**options, "state": state, "cu_seqlens": None}
            outputs.append(attend_locally(q[:, :, part], k[:, :, part], v[:, :, part], **given))
        return torch.cat(outputs, dim=2)

    def _parts(self) -> list[slice]:
        """Return the tokens of each run."""
        return [slice(run.offset, run.offset + run.length) for run in self._runs]

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Return runs as rows: [runs * batch, ...] from [batch, ...] with all tokens in dimension `dim`."""
        if not self._splits:
            return x
        return x.unflatten(dim, (len(self._runs), -1)).movedim(dim, 0).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Return outputs [batch, heads, tokens, v_dim] from rows."""
        if not self._splits:
            return x
        return x.unflatten(0, (len(self._runs), self.batch)).movedim(0, 2).flatten(2, 3)

    def positions(self, starts: int | Tensor) -> Tensor:
        """Return the positions of the keys of all rows. `starts` is an int, or has one number per row."""
        if not self._runs:
            return self._positions
        if self.cu_seqlens is not None:
            if isinstance(starts, Tensor):
                starts = starts.repeat_interleave(self.cu_seqlens.diff())
            return self._positions + starts
        ids = self._positions
        if self._splits:
            ids = ids.unflatten(0, (len(self._runs), -1)).repeat_interleave(self.batch, dim=0)
        return ids + (starts[:, None] if isinstance(starts, Tensor) else starts)

    def sequences(self, runs: tuple[Run, ...]) -> Tensor:
        """Return the row of an initial state that each row of these runs continues."""
        if self._packed:
            return tensor([run.sequence for run in runs], dtype=torch.int64, device=self._device)
        return arange(self.batch, device=self._device).repeat(len(runs))


def _ends(shards: Shards) -> tuple[Run, ...]:
    """Return runs of no tokens after the last token of each sequence."""
    lengths = [0] * (shards.sequences or 1)
    for runs in shards.runs:
        for run in runs:
            lengths[run.sequence] = max(lengths[run.sequence], run.stop)
    return tuple(Run(sequence, length, length, 0) for sequence, length in enumerate(lengths))


def _starts(state: LinearState | None, sequences: Tensor) -> int | Tensor:
    """Return the position of the first token of the sequence of each row: an int, or a tensor [rows]."""
    start = 0 if state is None else state.start(len(state.above))
    return start[sequences] if isinstance(start, Tensor) else start


def _after_initial(
    state: LinearState | None, before: LinearState, rows: Tensor, rope: RotaryEmbedding | Encoding | None
) -> LinearState:
    """Return the states that continue an initial state."""
    if state is None:
        return before
    # Positions continue from the state, so the first one is known to follow it.
    return state.reorder(rows).merge(replace(before, first=None), rope=rope if before.spec is not None else None)


def _length(
    rope: RotaryEmbedding | Encoding | None, shards: Shards, state: LinearState | None, length: int | None
) -> int | None:
    """Return the length for rules that depend on it."""
    length = getattr(rope, "at_length", None) if length is None else length
    rotation = rope_in(rope)
    if rotation is None or not rotation.spec.varies or length is not None:
        return length
    return shards.length + (state.position if state is not None and isinstance(state.position, int) else 0)


def _check_as_one_rank(
    q: Tensor, k: Tensor, v: Tensor, shards: Shards, state: LinearState | None, options: LinearOptions
) -> None:
    """Raise what a call on one rank raises, on every rank: a rank without tokens reads no state and calls no map.

    It is a call of the first two tokens of the longest sequence, as zeros, or of its only one.
    """
    lengths = [stop - start for start, stop in itertools.pairwise(shards.ends)]
    tokens, row, decay = min(2, max(lengths)), lengths.index(max(lengths)), options.get("decay")
    if decay is not None and decay.dim() == 3:
        decay = new_zeros(decay, 1, decay.shape[1], tokens)
    tensors = [new_zeros(x, 1, x.shape[1], tokens, x.shape[-1]) for x in (q, k, v)]
    before = None if state is None else state.reorder(arange(row, row + 1, device=state.above.device))
    with torch.no_grad():
        attend_locally(*tensors, **{**options, "decay": decay, "state": before, "backend": "torch"})


def _check_options(
    q: Tensor,
    k: Tensor,
    shards: Shards,
    causal: bool,
    decay: Tensor | None,
    bias: Encoding | None,
    state: LinearState | None,
    return_state: bool,
    length: int | None,
) -> None:
    """Raise unless the options of this rank are valid."""
    require_flag(return_state, asked=f"{_ASKED}(return_state=...)")
    if not causal and (decay is not None or bias is not None or state is not None or return_state):
        raise RopewalkError(
            asked=f"{_ASKED}(causal=False)",
            expected="no decay, bias or state: they are computed in the order of the tokens",
            got="decay" if decay is not None else "bias" if bias is not None else "state",
            do="pass causal=True, or use parallel.attention for a bias in both directions",
        )
    heads = sorted({k.shape[1], q.shape[1]})
    shapes = [[n] for n in heads] + [[len(k), n, k.shape[2]] for n in heads]
    if decay is not None and (not isinstance(decay, Tensor) or list(decay.shape) not in shapes):
        raise RopewalkError(
            asked=f"{_ASKED}(decay=...)",
            expected=f"a tensor of shape {' or '.join(map(str, shapes))}: per head, or per token of this rank",
            got=described(decay),
            do="cut a decay per token as the tokens: shards.cut(decay, dim=2)",
        )
    if decay is not None:
        sizes = len(k), q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        checked_decay(decay, Tokens(*sizes, k.device, True, 0, None, None, None, False), _ASKED)
    if length is not None and as_int(length) is None:
        raise RopewalkError(
            asked=f"{_ASKED}(length=...)",
            expected="an int, the same for all sequences",
            got=shown(length),
            do="pass the number of tokens that determines the frequencies",
        )
    rows = len(q) if shards.sequences is None else shards.sequences
    checked_start(state, rows, asked=f"{_ASKED}(state=...)")
    found = None if state is None else [len(x) for x in (state.above, state.below)]
    if found is not None and found != [rows, rows]:
        raise RopewalkError(
            asked=f"{_ASKED}(state=...)",
            expected=f"a state of {rows} sequences",
            got=f"sums of {found[0]} and {found[1]} sequences",
            do="pass the state that an earlier call with these sequences returned, or None",
        )


def _sums_of(state: LinearState) -> list[Tensor]:
    """Return what can need a gradient: the tensors of a state that were computed from keys and values."""
    near = () if state.near is None else (state.near.keys, state.near.values)
    return [x for x in (state.above, state.below, state.log_decay, *near) if x is not None]


def _described_state(state: LinearState | None) -> str:
    """Describe what must be the same on all ranks."""
    if state is None:
        return "none"
    position = state.position
    if isinstance(position, Tensor):
        position = position.tolist() if can_read_values(position) else list(position.shape)
    tensors = state.above, state.below, *(state.near or ()), state.log_decay, state.slopes, state.first
    sizes = [(list(x.shape), x.dtype, x.device.type) if isinstance(x, Tensor) else x for x in tensors]
    length = list(state.length.shape) if isinstance(state.length, Tensor) else state.length
    fields = state.spec, state.feature_map, state.learned, state.encoding, state.weighting, length
    return f"{sizes} at {position}, {fields}, gradients {needs_gradients(*_sums_of(state))}"
