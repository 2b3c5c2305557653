"""What `rotate_` refuses, and that a call that is refused leaves both tensors as they are."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from ropewalk import RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.nn.rotary import in_place
from ropewalk.spec import StepTemperature, XPos

SHARED = torch.ones(1, 2, 10, 8)
with torch.inference_mode():
    INFERENCE = torch.ones(2, 4, 5, 8)
Q = torch.ones(2, 4, 5, 8)
TEMPERATURE = StepTemperature(0.1, 8)


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        (torch.ones(1, 8).expand(5, 8), None, "separate memory for every element"),
        (torch.ones(2, 1, 5, 8).expand(2, 4, 5, 8), None, "separate memory"),
        (torch.ones(40).as_strided((5, 8), (4, 1)), None, "separate memory"),
        (Q, Q, "elements that belong to both"),
        (SHARED[:, :, :6], SHARED[:, :, 4:], "elements that belong to both"),
        (SHARED[:, :, :2], SHARED.transpose(1, 2)[:, :6, :2], "elements that belong to both"),
        (Q.clone(), torch.ones(2, 4, 5, 8, requires_grad=True)[:], "a view of one"),
        (Q.clone(), INFERENCE, "an inference tensor"),
        (torch.ones(5, 8, requires_grad=True), None, "a leaf"),
    ],
)
def test_what_is_refused_is_not_written(q, k, message):
    with pytest.raises(RopewalkError, match=message):
        RotaryEmbedding(8).rotate_(q, k)
    assert (q == 1).all()


def test_a_mistake_in_the_second_tensor_leaves_the_first_alone():
    q = torch.ones(1, 2, 5, 8)
    with pytest.raises(RopewalkError, match="as many keys"):
        RotaryEmbedding(8).rotate_(q, torch.ones(1, 2, 3, 8))
    assert (q == 1).all()


def of_custom_function(x: Tensor) -> Tensor:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)[0], x.new_zeros(())

        @staticmethod
        def backward(ctx, *grads):
            return grads[0].expand(2, *grads[0].shape)

    return Both.apply(x)[0]


def made_under(mode, x: Tensor) -> Tensor:
    with mode():
        return x[0]


FIXED = {
    "unbind": lambda x: x.unbind(0)[0],
    "split": lambda x: x.split(1)[0][0],
    "chunk": lambda x: x.chunk(2)[1][0],
    "part of one": lambda x: x.unbind(0)[1][:1],
    "no_grad": lambda x: made_under(torch.no_grad, x),
    "inference mode": lambda x: made_under(torch.inference_mode, x),
    "custom function": of_custom_function,
}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("with_positions", [False, True])
@pytest.mark.parametrize("name", FIXED)
def test_a_view_that_autograd_does_not_let_be_written(name, with_positions, learned):
    base = torch.ones(2, 2, 3, 8, requires_grad=not learned) * 1
    k = FIXED[name](base)
    q = torch.ones(k.shape, requires_grad=True) * 1
    version = q._version
    options = {"k_positions": torch.arange(3)} if with_positions else {}
    rope = RotaryEmbedding(8, learned=learned)
    with pytest.raises(RopewalkError, match=r"rope.rotate_\(k\)"):
        rope.rotate_(q, k, offset=None, **options)
    assert (q == 1).all()
    assert (k == 1).all()
    assert q._version == version
    # Nothing is wrong with them where no gradient is asked for, nor with a view by an index.
    with torch.no_grad():
        rope.rotate_(q, k, **options)
    rope.rotate_(torch.ones(2, 3, 8), base[0] if not learned else base.clone()[0])


def test_a_backend_that_cannot_rotate_the_second_tensor_leaves_the_first_alone():
    rope = RotaryEmbedding(8, backend="native")
    q, k = torch.ones(3, 8), torch.ones(*[1] * 20, 3, 8)
    with pytest.raises(RopewalkError, match="native"):
        rope.rotate_(q, k, k_positions=torch.arange(3))
    assert (q == 1).all()


def test_meta_tensors_share_nothing():
    q, k = torch.empty(1, 2, 3, 8, device="meta"), torch.empty(1, 2, 3, 8, device="meta")
    assert RotaryEmbedding(8).rotate_(q, k)[1] is k


def test_memory_that_two_storages_share():
    memory, rope = np.zeros(2000, dtype=np.float32), RotaryEmbedding(8)
    q = torch.from_numpy(memory)[:480].view(1, 4, 15, 8)
    with pytest.raises(RopewalkError, match="elements that belong to both"):
        rope.rotate_(q, torch.from_numpy(memory[64:])[:480].view(1, 4, 15, 8))
    with pytest.raises(RopewalkError, match="elements that belong to both"):
        rope.rotate_(q, torch.frombuffer(memory.data, dtype=torch.float32, offset=2, count=480).view(1, 4, 15, 8))
    rope.rotate_(q, torch.from_numpy(memory[480:])[:480].view(1, 4, 15, 8))


@pytest.mark.parametrize("stride", [0, 1, 7])
def test_a_dimension_of_size_one_may_have_any_stride(stride):
    q, k = (torch.ones(200).as_strided((1, 3, 8), (stride, 8, 1), offset) for offset in (0, 24))
    expected = RotaryEmbedding(8)(torch.ones(3, 8))
    for rotated in RotaryEmbedding(8).rotate_(q, k):
        assert torch.equal(rotated[0], expected)


def addresses(x: Tensor) -> list[int]:
    steps = [[stride * i for i in range(size)] for stride, size in zip(x.stride(), x.shape, strict=True)]
    return [int(x.storage_offset()) + sum(index) for index in itertools.product(*steps)]


def some_view(random: np.random.Generator, memory: Tensor) -> Tensor:
    """A view with any strides, nested or not, with sizes and strides of 0 and 1 among them."""
    dims = int(random.integers(1, 5))
    shape = [int(random.choice((1, 1, 2, 2, 3, 4))) for _ in range(dims)]
    usual = list(np.cumprod([1, *shape[:0:-1]])[::-1])
    strides = usual if random.random() < 0.4 else [int(random.integers(0, 25)) for _ in shape]
    if random.random() < 0.4:
        strides = [int(stride) * int(random.choice((1, 1, 2, 3))) for stride in strides]
    order = random.permutation(dims)
    shape, strides = [shape[i] for i in order], [int(strides[i]) for i in order]
    return memory.as_strided(shape, strides, int(random.integers(0, 60)))


@pytest.mark.parametrize("seed", range(4))
def test_overlaps_are_decided_exactly(seed):
    random, memory = np.random.default_rng(seed), torch.zeros(1000)
    selves, pairs = set(), set()
    for _ in range(500):
        q, k = some_view(random, memory), some_view(random, memory)
        of_q, of_k = addresses(q), addresses(k)
        twice = len(set(of_q)) < len(of_q)
        assert in_place._overlaps_itself(q) == twice, (q.shape, q.stride())
        common = not set(of_q).isdisjoint(of_k)
        assert in_place._share_elements(q, k) == common, (q.shape, q.stride(), k.shape, k.stride())
        selves.add(twice)
        pairs.add(common)
    assert selves == pairs == {True, False}


def test_strides_that_cannot_be_decided_are_refused(monkeypatch):
    monkeypatch.setattr(in_place, "_MOST_WORK", 1)
    memory = torch.ones(10_000)
    q = memory.as_strided((1, 3, 8), (0, 801, 97))
    k = memory.as_strided((1, 3, 8), (0, 803, 95), 7)
    assert set(addresses(q)).isdisjoint(addresses(k))
    with pytest.raises(RopewalkError, match="cannot be decided"):
        RotaryEmbedding(8).rotate_(q, k)
    assert (memory == 1).all()


@pytest.mark.parametrize("spec", [RopeSpec(8, xpos=XPos(64)), RopeSpec(8, rotary_dim=4, query_temperature=TEMPERATURE)])
def test_specs_that_rotate_q_and_k_apart_keep_the_promise(spec):
    q, k = torch.ones(2, 3, 8, requires_grad=True) * 1, (torch.ones(2, 2, 3, 8, requires_grad=True) * 1).unbind(0)[0]
    with pytest.raises(RopewalkError, match="unbind"):
        RotaryEmbedding(spec).rotate_(q, k, positions=torch.arange(3))
    assert (q == 1).all()
