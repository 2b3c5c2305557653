"""The rotation functions for timm, and DINOv3's positions, against timm's own code."""

import pytest
import torch

from hub.alone import timm_rope
from ropewalk import Axes, Plain, RopeSpec, RopewalkError, RotaryEmbedding
from ropewalk.hub.adapters import timm as ours
from ropewalk.positions import centred_positions, grid_positions, jittered_positions
from strategies import vector


@pytest.fixture(scope="module")
def timm():
    return timm_rope()


def tables(timm, kind, dim=16):
    """A module of timm, the shape of its table for x [2, 3, 20, dim], and half."""
    if kind == "cat":
        return timm.RotaryEmbeddingCat(dim, in_pixels=False, feat_shape=[4, 5]).get_embed(), False
    if kind == "pixels":
        return timm.RotaryEmbeddingCat(dim).get_embed([4, 5]), False
    if kind == "dinov3":
        return timm.RotaryEmbeddingDinoV3(dim, feat_shape=[4, 5]).get_embed(), True
    if kind == "padded batch":
        return timm.RotaryEmbeddingCat(dim).get_batch_embeds([(4, 5), (2, 3)], seq_len=20).unsqueeze(1), False
    # Mixed: learned frequencies per head.
    return timm.RotaryEmbeddingMixed(dim * 3, depth=2, num_heads=3, feat_shape=[4, 5]).get_embed()[1], False


@pytest.mark.parametrize("kind", ["cat", "pixels", "dinov3", "padded batch", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_timm_s_own_tables(timm, kind, dtype):
    emb, half = tables(timm, kind)
    emb = emb.detach()
    x, cotangent = vector(0, 2, 3, 20, 16).to(dtype), vector(1, 2, 3, 20, 16).to(dtype)
    truth_x, table, leaf = x.double().requires_grad_(), emb.clone().requires_grad_(), x.clone().requires_grad_()
    wide = emb.double().requires_grad_()
    truth = timm.apply_rot_embed_cat(truth_x, wide, half=half)
    of_truth = torch.autograd.grad(truth, (truth_x, wide), cotangent.double())
    y = ours.apply_rot_embed_cat(leaf, table, half=half)
    gradients = torch.autograd.grad(y, (leaf, table), cotangent)
    # timm reads the table of both features of a pair, and so do not the kernels: its gradient is that of the pair.
    sin, cos = (
        g.unflatten(-1, (2, -1)).sum(-2) if half else g.unflatten(-1, (-1, 2)).sum(-1) for g in of_truth[1].chunk(2, -1)
    )
    found = [g[..., :8] if half else g[..., ::2] for g in gradients[1].chunk(2, -1)]
    plain_leaf = x.clone().requires_grad_()
    plain = timm.apply_rot_embed_cat(plain_leaf, emb, half=half)
    (of_plain,) = torch.autograd.grad(plain, plain_leaf, cotangent)
    assert y.dtype == dtype
    for result, theirs, exact in ((y, plain, truth), (gradients[0], of_plain, of_truth[0])):
        # The two-times rule.
        error, allowed = ((r.double() - exact).abs().max() for r in (result, theirs))
        assert error <= 2 * allowed
    for result, exact in zip(found, (sin, cos), strict=True):
        scale = 1e-4 if dtype == torch.float32 else 0.05
        assert torch.allclose(result.double(), exact, atol=scale * exact.abs().max().item())
    # Without gradients the kernels run.
    assert torch.allclose(
        ours.apply_rot_embed_cat(x, emb, half=half), y.detach(), atol=0.02 if dtype != torch.float32 else 1e-6
    )


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        ((20, 16), (20, 16)),
        ((5, 20, 16), (5, 20, 16)),
        ((5, 20, 16), (1, 20, 16)),
        ((2, 3, 20, 16), (3, 20, 16)),
        ((2, 3, 20, 16), (1, 16)),
        ((2, 3, 4, 20, 16), (3, 1, 20, 16)),
        ((2, 3, 20, 16), (2, 3, 20, 16)),
    ],
)
def test_every_way_to_broadcast(timm, half, shapes):
    x, angles = vector(0, *shapes[0]), vector(1, *shapes[1][:-1], 8)
    angles = torch.cat((angles, angles), -1) if half else angles.repeat_interleave(2, -1)
    expected = timm.apply_rot_embed(x, angles.sin(), angles.cos(), half=half)
    assert torch.allclose(ours.apply_rot_embed(x, angles.sin(), angles.cos(), half=half), expected, atol=1e-12)
    (listed,) = ours.apply_rot_embed_list(x, angles.sin(), angles.cos(), half)
    assert torch.allclose(listed, expected, atol=1e-12)


def test_axial_positions_are_timm_s(timm):
    x = vector(0, 1, 2, 20, 16).float()
    spec = RopeSpec(16, Plain(10_000), axes=Axes.repeated(2, 16))
    rotated = RotaryEmbedding(spec)(x, positions=grid_positions(4, 5))
    emb = timm.RotaryEmbeddingCat(16, in_pixels=False, feat_shape=[4, 5]).get_embed()
    assert torch.allclose(rotated, timm.apply_rot_embed_cat(x, emb), atol=1e-5)


@pytest.mark.parametrize(
    "augmentation",
    [{}, {"shift": 0.3}, {"jitter": 1.5}, {"rescale": 2.0}, {"shift": 0.3, "jitter": 1.5, "rescale": 2.0}],
)
def test_box_jitter_of_dinov3_with_the_same_seed(timm, augmentation):
    options = {f"{name}_coords": value for name, value in augmentation.items()}
    embed = timm.RotaryEmbeddingDinoV3(16, **options).train()
    x = vector(0, 1, 2, 20, 16).float()
    torch.manual_seed(7)
    expected = timm.apply_rot_embed_cat(x, embed.get_embed([4, 5]), half=True)
    torch.manual_seed(7)
    positions = jittered_positions(centred_positions(4, 5), **augmentation)
    rope = RotaryEmbedding(RopeSpec(16, Plain(100), axes=Axes.repeated(2, 16), pairing="half"))
    assert torch.allclose(rope(x, positions=positions), expected, atol=1e-5)
    again = jittered_positions(centred_positions(4, 5), **augmentation, generator=torch.Generator().manual_seed(7))
    assert torch.equal(again, positions)


@pytest.mark.parametrize(
    ("option", "value"), [("shift", -0.1), ("jitter", 0.5), ("rescale", float("inf")), ("jitter", "a")]
)
def test_ranges_that_jitter_does_not_accept(option, value):
    with pytest.raises(RopewalkError, match=rf"jittered_positions\({option}=\.\.\.\)"):
        jittered_positions(centred_positions(2, 2), **{option: value})


@pytest.mark.parametrize(
    "shapes", [((20, 15), (20, 15)), ((20, 16), (19, 16)), ((20, 16), (2, 20, 16)), ((20, 16), (20, 8))]
)
def test_tables_that_do_not_fit(shapes):
    x, table = (torch.ones(shape) for shape in shapes)
    with pytest.raises(RopewalkError, match=r"apply_rot_embed\(x, sin_emb, cos_emb\)"):
        ours.apply_rot_embed(x, table, table)
