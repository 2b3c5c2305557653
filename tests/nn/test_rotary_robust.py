"""Everything that PyTorch does to a module and to its inputs: the rotation is bit-identical before and after.

Each defect of a library in the field that this module replaces is a test here.
"""

import copy
import gc
import io
import itertools
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, Dataset

from ropewalk import RopeSpec, RotaryEmbedding
from ropewalk.kernels.rotate import torch as rotate_torch
from ropewalk.nn.rotary import range_cache
from ropewalk.reference import assert_within_budget, rotate
from ropewalk.spec import AcrossHeads
from strategies import theta, vector

X = vector(0, 2, 3, 40, 8).float()
FAR = torch.arange(40) + 100_000


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def made_on_meta(module):
    with torch.device("meta"):
        fresh = RotaryEmbedding(module.spec)
    return fresh.to_empty(device="cpu")


def loaded(module):
    fresh = RotaryEmbedding(module.spec)
    fresh.load_state_dict(module.state_dict(), strict=True)
    return fresh


TREATMENTS = {
    "to bfloat16": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "half and back": lambda m: m.half().float(),
    "to meta and back": lambda m: m.to("meta").to_empty(device="cpu"),
    "made on meta": made_on_meta,
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "load_state_dict": loaded,
    "share_memory": lambda m: m.share_memory(),
    "eval": lambda m: m.eval(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "in a model that is cast": lambda m: nn.Sequential(nn.Linear(2, 2), m).to(torch.bfloat16)[1],
}


@pytest.mark.parametrize("treatment", TREATMENTS)
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("spec", [RopeSpec(8), RopeSpec(8, AcrossHeads(num_heads=3)), RopeSpec(8, angles="float32")])
def test_the_rotation_is_bit_identical_after(treatment, used_before, spec):
    module = RotaryEmbedding(spec)
    expected = RotaryEmbedding(spec)(X), RotaryEmbedding(spec)(X, positions=FAR)
    if used_before:
        module(X)
    treated = TREATMENTS[treatment](module)
    assert torch.equal(treated(X), expected[0])
    assert torch.equal(treated(X, positions=FAR), expected[1])
    assert len(treated.state_dict()) == len(list(treated.parameters())) == len(list(treated.buffers())) == 0


def test_learned_frequencies_made_on_meta_are_reset_like_any_parameter():
    with torch.device("meta"):
        rope = RotaryEmbedding(8, learned=True)
    rope.to_empty(device="cpu").reset_parameters()
    assert torch.equal(rope(X), RotaryEmbedding(8, learned=True)(X))


def test_under_autocast():
    rope = RotaryEmbedding(8)
    expected = rope(X, positions=FAR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(RotaryEmbedding(8)(X, positions=FAR), expected)
        assert torch.equal(rope(X.bfloat16()), RotaryEmbedding(8)(X.bfloat16()))
        assert rope(X.bfloat16()).dtype == torch.bfloat16


def test_a_bfloat16_call_does_not_poison_a_later_float32_call():
    rope = RotaryEmbedding(8)
    rope(vector(1, 1, 1, 1024, 8).bfloat16())
    x = vector(1, 1, 1, 1024, 8).float()
    assert_within_budget(rope(x), rotate(x.double(), torch.arange(1024), theta(8)), rotary_dim=8)
    double = rope(x.double())
    assert_within_budget(double, rotate(x.double(), torch.arange(1024), theta(8)), rotary_dim=8, farthest=1024)


def test_inference_mode_and_then_training():
    rope = RotaryEmbedding(8)
    with torch.inference_mode():
        rope(X)
    x = X.clone().requires_grad_()
    rope(x).sum().backward()
    assert x.grad is not None


def test_made_in_inference_mode():
    with torch.inference_mode():
        rope = RotaryEmbedding(8)
        rope(X)
    x = X.clone().requires_grad_()
    rope(x).sum().backward()
    assert x.grad is not None
    ids = torch.rand(40, dtype=torch.float64, requires_grad=True)
    rope(x, positions=ids).sum().backward()
    assert ids.grad is not None


@pytest.mark.parametrize("called_before", [False, True])
def test_fake_tensors_leave_nothing_behind(called_before):
    rope = RotaryEmbedding(8)
    if called_before:
        rope(X)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = rope(mode.from_tensor(X))
        assert y.shape == X.shape
        assert type(y) is not torch.Tensor
    assert torch.equal(rope(X), RotaryEmbedding(8)(X))


def test_inputs_are_unchanged_and_results_are_fresh():
    rope, x, ids = RotaryEmbedding(8), X.clone(), FAR.clone()
    first = rope(x, positions=ids)
    assert torch.equal(x, X)
    assert torch.equal(ids, FAR)
    first.zero_()
    assert torch.equal(rope(x, positions=ids), RotaryEmbedding(8)(X, positions=FAR))
    zero = rope(x[:, :, :1], offset=0)
    assert zero.data_ptr() != x.data_ptr()


def test_cached_ranges_do_not_change_results():
    rope = RotaryEmbedding(8)
    for start, seq in ((0, 40), (40, 1), (41, 1), (300, 5), (0, 700), (699, 1), (255, 2), (-3, 40), (10**6, 3), (0, 1)):
        x = vector(seq, 1, 1, seq, 8).float()
        fresh = RotaryEmbedding(8)(x, positions=torch.arange(seq) + start)
        assert torch.equal(rope(x, offset=start), fresh), (start, seq)
    longest = range_cache.MOST_NUMBERS // 4
    long = torch.ones(1, 1, 8).expand(1, longest + 5, 8)
    assert torch.equal(rope(long), RotaryEmbedding(8)(long, positions=torch.arange(longest + 5)))
    assert all(block.stop - block.start < longest for block in rope._source.ranges._blocks)
    # A caller cannot change the cached cos and sin.
    cos, _ = rope.at(torch.arange(5))
    cos.fill_(7)
    assert torch.equal(rope(X), RotaryEmbedding(8)(X))


def test_sequences_that_are_decoded_alternately_have_a_block_each(monkeypatch):
    # Equal ropes share their blocks, so no other test has this base.
    rope, made = RotaryEmbedding(8, base=12_347), []
    real = rope._source.at
    monkeypatch.setattr(rope._source, "at", lambda *arguments: made.append(1) or real(*arguments))
    for step in range(20):
        for start in (10, 100_000, 5_000):
            rope(X[:, :, :1], offset=start + step)
    assert len(made) == 3
    for start in range(0, 200_000, 10_000):
        rope(X[:, :, :1], offset=start)
    assert len(rope._source.ranges._blocks) == range_cache.MOST_BLOCKS


def test_cached_ranges_have_a_limit():
    rope, longest = RotaryEmbedding(8), range_cache.MOST_NUMBERS // 4
    for start in (0, 10**6, 10**7):
        rope(torch.ones(1, 1, 8).expand(1, longest, 8), offset=start)
    rows = sum(block.stop - block.start for block in rope._source.ranges._blocks)
    assert longest <= rows <= longest + 8 * range_cache.STEP


def test_copies_leave_the_ranges_and_the_table_behind():
    rope = RotaryEmbedding(128)
    rope(torch.ones(1, 1, 100, 128))
    assert len(pickle.dumps(rope)) < 20_000
    for other in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope))):
        assert other._source.shortcut is None
        assert torch.equal(other(torch.ones(1, 1, 100, 128)), rope(torch.ones(1, 1, 100, 128)))


def test_equal_ropes_share_their_ranges_while_one_is_alive():
    layers = [RotaryEmbedding(8, base=12_345) for _ in range(3)]
    assert all(torch.equal(rope(X), layers[0](X)) for rope in layers)
    assert len({id(rope._source.ranges._blocks[0].cos) for rope in layers}) == 1
    alike = [RotaryEmbedding(8, base=12_346), RotaryEmbedding(8, base=12_345, backend="torch")]
    assert all(rope._source.ranges is not layers[0]._source.ranges for rope in alike)
    ranges = weakref.ref(layers[0]._source.ranges)
    del layers
    gc.collect()
    assert ranges() is None


def test_modules_with_other_bases_share_nothing():
    small, large = RotaryEmbedding(8, base=100), RotaryEmbedding(8, base=1e6)
    for _ in range(2):
        for rope, base in ((small, 100.0), (large, 1e6)):
            assert_within_budget(rope(X), rotate(X.double(), torch.arange(40), theta(8, base)), rotary_dim=8)


def test_sixteen_threads_at_growing_lengths():
    rope, wrong = RotaryEmbedding(8), []
    expected = {seq: RotaryEmbedding(8)(vector(seq, 1, 1, seq, 8).float()) for seq in range(1, 1200, 100)}

    def work(worker: int) -> None:
        for seq in list(expected)[worker % 3 :]:
            x = vector(seq, 1, 1, seq, 8).float()
            if not torch.equal(rope(x), expected[seq]):
                wrong.append(seq)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Rotated(Dataset):
    def __init__(self) -> None:
        self.rope = RotaryEmbedding(8)
        self.rope(X)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rope(X, offset=index)


def test_forked_workers():
    data = Rotated()
    for index, batch in enumerate(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")):
        assert torch.equal(batch, data[index])


def test_three_dimensions_with_ids_a_batch():
    # More batches than tokens, which one library slices along the wrong dimension.
    x = vector(0, 9, 4, 8).float()
    ids = torch.randint(0, 1000, (9, 4), generator=torch.Generator().manual_seed(0))
    rope = RotaryEmbedding(8)
    assert torch.equal(rope(x, positions=ids), torch.stack([rope(x[b], positions=ids[b]) for b in range(9)]))


def test_float64_is_worked_in_float64():
    rope, x = RotaryEmbedding(8), vector(0, 1, 1, 100, 8)
    truth = rotate(x, torch.arange(100) + (1 << 20), theta(8))
    assert (rope(x, offset=1 << 20) - truth).abs().max() < 1e-12


def test_other_tensor_types_never_reach_a_pointer():
    class Mine(torch.Tensor):
        pass

    rope, x = RotaryEmbedding(8), X.as_subclass(Mine)
    y = rope(x)
    assert type(y) is Mine
    assert torch.allclose(y.as_subclass(torch.Tensor), rope(X), atol=1e-6)


def test_results_keep_the_strides_of_their_input():
    x = X.transpose(1, 2).contiguous().transpose(1, 2)
    assert RotaryEmbedding(8)(x).stride() == x.stride()
    y = x.clone(memory_format=torch.preserve_format).requires_grad_()
    RotaryEmbedding(8)(y).backward(torch.ones_like(x))
    assert y.grad is not None
    assert y.grad.stride() == x.stride()


def most_memory(run):
    """The peak of the memory that a call allocated, in bytes, and its result."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        outputs = run()
    events = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    memory = sorted(
        (event.start_ns(), event.nbytes())  # pyright: ignore[reportAttributeAccessIssue]
        for event in events
        if event.name() == "[memory]"
    )
    return max(itertools.accumulate(change for _, change in memory)), outputs


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_torch_path_allocates_its_outputs_and_at_most_one_temporary(pairing, fused, monkeypatch):
    monkeypatch.setattr(rotate_torch, "_fuses_alike", lambda *what: fused)
    rope = RotaryEmbedding(64, pairing=pairing, backend="torch")
    q, k = torch.ones(1, 8, 512, 64), torch.ones(1, 2, 512, 64)
    rope(q, k)
    with torch.no_grad():
        held, outputs = most_memory(lambda: rope(q, k))
    size = sum(y.numel() * y.element_size() for y in outputs)
    tables = 4 * 512 * 64 * 4
    assert size <= held <= size + (0 if fused else q.numel() * q.element_size()) + tables


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_the_c_kernel_allocates_its_outputs_and_nothing_else(pairing, dtype, layout):
    rope = RotaryEmbedding(64, pairing=pairing, backend="native")
    q, k = (torch.ones(1, heads, 512, 64, dtype=dtype) for heads in (8, 2))
    if layout == "transposed":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    rope(q, k)
    size = (q.numel() + k.numel()) * q.element_size()
    with torch.no_grad():
        held, outputs = most_memory(lambda: rope(q, k))
    assert held == size
    q, k = q.requires_grad_(), k.requires_grad_()
    outputs = rope(q, k)
    cotangents = [torch.ones_like(y) for y in outputs]
    held, _ = most_memory(lambda: torch.autograd.grad(outputs, (q, k), cotangents))
    assert held == size
    with torch.no_grad():
        q, k = q.detach().clone(), k.detach().clone()
        held, _ = most_memory(lambda: (rope.rotate_(q, k), torch.empty(1))[0])
    assert held < 1024
