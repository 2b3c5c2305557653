"""to_jax and to_mlx: values and gradients of JAX and MLX on the CPU, against the reference."""

import numpy as np
import pytest
import torch

from ropewalk import Axes, LogTemperature, Proportional, RopeSpec, RopewalkError, RotaryEmbedding, XPos, Yarn
from ropewalk.hub import to_jax, to_mlx
from ropewalk.spec import NTK, AcrossHeads, DynamicNTK, Plain
from strategies import vector

SPECS = {
    "plain": RopeSpec(8),
    "half, base": RopeSpec(8, Plain(500_000), pairing="half"),
    "partial": RopeSpec(8, rotary_dim=4, pairing="half"),
    "trailing, clockwise": RopeSpec(8, NTK(factor=4), rotary_dim=4, rotary_slice="trailing", sign=-1),
    "yarn, partial": RopeSpec(8, Yarn(factor=8, trained_length=32), rotary_dim=6, pairing="half"),
    "pairs at rest": RopeSpec(8, Proportional(10_000, fraction=0.5), pairing="half"),
    "length": RopeSpec(8, DynamicNTK(factor=2, trained_length=16)),
}


def truth_of(spec, x, positions, length=None):
    return RotaryEmbedding(spec, backend="torch")(x.double(), positions=positions, length=length)


@pytest.mark.parametrize("name", SPECS)
def test_mlx_rotates_as_the_module_does(name):
    mx = pytest.importorskip("mlx.core")
    spec, x = SPECS[name], vector(0, 2, 3, 7, 8)
    length = 100 if spec.varies else None
    rope = to_mlx(spec, length=length)
    for offset in (0, 1000):
        positions = torch.arange(7) + offset
        # MLX computes angles in float32: half an ulp of the angle, and the rounding of theta times the position.
        bound = 2e-6 + offset * 2**-22
        truth = truth_of(spec, x, positions, length)
        y = np.array(rope(mx.array(x.float().numpy()), offset))
        assert np.abs(y - truth.numpy()).max() < bound
        low = rope(mx.array(x.float().numpy()).astype(mx.bfloat16), offset)
        assert low.dtype == mx.bfloat16
        assert np.abs(np.array(low.astype(mx.float32)) - truth.numpy()).max() < 0.05
        # The gradient: the rotation by the opposite angles.
        seed = vector(1, 2, 3, 7, 8)
        cotangent = mx.array(seed.float().numpy())
        gradient = mx.grad(lambda a, at=offset, g=cotangent: (rope(a, at) * g).sum())
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(truth_of(spec, leaf, positions, length), leaf, seed)
        assert np.abs(np.array(gradient(mx.array(x.float().numpy()))) - expected.numpy()).max() < bound


@pytest.mark.parametrize("name", SPECS)
def test_the_arguments_of_mlx_are_those_of_its_documented_formula(name):
    # theta_i = base^(-2i/dims) or 1 / freqs_i; consecutive pairs if traditional.
    spec, x, positions = SPECS[name], vector(0, 5, 8), torch.arange(5)
    length = 100 if spec.varies else None
    rope = to_mlx(spec, length=length)
    given, dims = rope.arguments, rope.arguments["dims"]
    assert (given["base"] is None) != (given["freqs"] is None)
    with np.errstate(divide="ignore"):
        plain = given["freqs"] is None
        inv = given["base"] ** (-np.arange(0, dims, 2) / dims) if plain else 1 / given["freqs"].astype(np.float64)
    angles = positions.numpy()[:, None] * given["scale"] * inv
    part = x.numpy()[:, rope.start : rope.start + dims]
    a, b = (part[:, ::2], part[:, 1::2]) if given["traditional"] else np.split(part, 2, axis=1)
    pairs = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    y = x.numpy().copy()
    rotated = np.stack(pairs, -1).reshape(5, dims) if given["traditional"] else np.concatenate(pairs, 1)
    y[:, rope.start : rope.start + dims] = rotated * rope.amplitude
    assert np.abs(y - truth_of(spec, x, positions, length).numpy()).max() < 1e-6


TABLES = SPECS | {
    "axes": RopeSpec(8, axes=Axes.chunked([2, 1, 1]), sign=-1),
    "heads": RopeSpec(8, AcrossHeads(50.0, num_heads=3)),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_for_jax(name):
    pytest.importorskip("jax")
    spec = TABLES[name]
    length = 100 if spec.varies else None
    shape = (3, 2, 5) if spec.axes else (2, 5)
    positions = np.random.default_rng(0).integers(-100, 200_000, shape)
    for ids in (positions, positions[..., 0, :]):
        tables = to_jax(spec, ids, length=length)
        truth = RotaryEmbedding(spec).at(torch.as_tensor(ids), dtype=torch.float64, length=length)
        for table, expected in zip(tables, truth, strict=True):
            expected = expected.numpy().reshape(table.shape)
            assert table.dtype == np.float32
            assert np.abs(np.asarray(table) - expected).max() <= 2**-24 * spec.amplitude(length) + 1e-9


def test_a_rotation_in_jax_with_gradient():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    spec, x, seed = RopeSpec(8, pairing="half"), vector(0, 2, 3, 7, 8), vector(1, 2, 3, 7, 8)
    positions = np.arange(7) + 100_000
    cos, sin = to_jax(spec, positions)

    @jax.jit
    def rotated(x, cos, sin):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)

    given = jnp.asarray(x.float().numpy())
    leaf = x.clone().requires_grad_()
    truth = truth_of(spec, leaf, torch.as_tensor(positions))
    (expected,) = torch.autograd.grad(truth, leaf, seed)
    assert np.abs(np.asarray(rotated(given, cos, sin)) - truth.detach().numpy()).max() < 1e-6
    gradient = jax.grad(lambda x: (rotated(x, cos, sin) * jnp.asarray(seed.float().numpy())).sum())(given)
    assert np.abs(np.asarray(gradient) - expected.numpy()).max() < 1e-6
    # Angles in float32 are off by far more at these positions.
    naive = jnp.cos(jnp.asarray(positions, jnp.float32)[:, None] * jnp.asarray(spec.inv_freq(), jnp.float32))
    exact = np.cos(positions[:, None] * spec.inv_freq())
    assert np.abs(np.asarray(naive) - exact).max() > 1000 * np.abs(np.asarray(cos) - exact).max()
    # JAX arrays are accepted, traced ones are not.
    assert np.array_equal(to_jax(spec, jnp.arange(3))[0], to_jax(spec, [0, 1, 2])[0])
    with pytest.raises(RopewalkError, match=r"outside of jax\.jit"):
        jax.jit(lambda ids: to_jax(spec, ids))(jnp.arange(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_mlx(RopeSpec(8, axes=Axes.chunked([2, 2]))), "got:      2 axes"),
        (lambda: to_mlx(RopeSpec(8, AcrossHeads(50.0, num_heads=3))), "frequencies of 3 heads"),
        (lambda: to_mlx(RopeSpec(8, xpos=XPos(512))), "got:      xPos"),
        (lambda: to_jax(RopeSpec(8, query_temperature=LogTemperature(512)), [0]), "got:      a query temperature"),
        (lambda: to_jax({"head_dim": 8}, [0]), "expected: a RopeSpec"),
        (lambda: to_jax(RopeSpec(8), 3), r"of shape \[seq\] or \[batch, seq\]\ngot:      shape \[\]"),
        (lambda: to_jax(RopeSpec(8), [0.0, float("nan")]), "expected: finite numbers"),
        (lambda: to_jax(RopeSpec(8), ["a"]), "expected: finite numbers"),
        (lambda: to_jax(RopeSpec(8, axes=Axes.chunked([2, 2])), [[0], [1], [2]]), r"of shape \[2, seq\]"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(RopewalkError, match=message):
        call()


def test_mlx_checks_the_width():
    mx = pytest.importorskip("mlx.core")
    with pytest.raises(RopewalkError, match=r"\[batch, \.\.\., seq, 8\]"):
        to_mlx(RopeSpec(8))(mx.zeros((1, 1, 3, 16)))
