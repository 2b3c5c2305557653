"""Every public function with arguments and, for each argument, another value that must change the result or raise."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import ropewalk as rw
from ropewalk import reference, theory
from ropewalk.nn import RotaryEmbedding
from ropewalk.reference import Projections, elu_plus_one
from ropewalk.spec import Plain
from strategies import theta, vector

X, IDS = vector(0, 2, 3, 5, 8), torch.arange(5)
TABLE, WEIGHT = vector(1, 16, 8), vector(2, 8, 8)
COS, SIN = rw.build_rotary_frequencies(8, 5)
SHORT = vector(3, 2, 5, 8)
TUNED: dict[str, tuple[Any, Any]] = {
    "case": ("larger base", "tuned length"),
    "limit": (129_027.0, None),
    "critical_base": (71_738.0, 26_784.0),
    "trained_critical_dim": (92, 82),
    "critical_dim": (92, 106),
    "thresholds": ((2607.6, 1303.8, 651.9), (5215.2, 2607.6, 1303.8)),
    "slowest_rotation": (0.07, 1.2),
    "least_rotation": (0.0, 1.0),
}
ROTATION = {"x": X, "positions": IDS, "inv_freq": theta(8)}
ROTATION_CHANGES = {
    "x": X + 1,
    "positions": IDS + 1,
    "inv_freq": theta(8, 500.0),
    "pairing": "half",
    "conjugate": True,
    "amplitude": 2.0,
}
LINEAR = {"q": X, "k": X + 1, "v": X - 1, "inv_freq": theta(8)}
LINEAR_CHANGES = {
    "q": X * 2,
    "k": X,
    "v": X,
    "inv_freq": theta(8, 500.0),
    "positions": IDS * 2,
    "q_positions": IDS + 1,
    "pairing": "half",
    "causal": True,
    "q_map": torch.exp,
    "k_map": torch.exp,
    "decay": -torch.ones(3, dtype=torch.float64),
    "normalize": False,
}
UNDIVIDED = (LINEAR | {"normalize": False}, {"scale": 0.5})
YARN_CONFIG = {
    "model_type": "llama",
    "head_dim": 8,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.5,
        "mscale_all_dim": 1.0,
    },
}
ATTENTION = {"q": X, "k": X + 1, "v": X - 1, "rope": RotaryEmbedding(8)}
SOFTMAX = {"q": X, "k": X + 1, "v": X - 1, "encoding": RotaryEmbedding(8)}
DYNAMIC = RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(10_000.0, 4.0, 4)))
H = np.array([1.0, 2.0, -1.0], dtype=np.complex128)
# function -> (arguments, {argument: another value}); a list of such pairs where one call cannot show them all.
CASES: dict[Callable[..., Any], list[tuple[dict[str, Any], dict[str, Any]]]] = {
    **{
        form: [(ROTATION, ROTATION_CHANGES), (ROTATION | {"inv_freq": theta(4)}, {"rotary_slice": "trailing"})]
        for form in (reference.rotate, reference.rotate_complex, reference.rotate_matrix)
    },
    reference.rotate_by_spec: [
        (
            {"x": SHORT, "spec": rw.RopeSpec(8, rw.DynamicNTK(1e4, 2, 4), xpos=rw.XPos(64)), "positions": IDS},
            {
                "x": SHORT + 1,
                "spec": rw.RopeSpec(8),
                "positions": IDS + 1,
                "length": 64,
                "role": "q",
            },
        )
    ],
    rw.rotation_matrix: [
        (
            {"spec": rw.RopeSpec(8, rw.DynamicNTK(1e4, 2, 4), xpos=rw.XPos(64)), "position": 3}
            | {"length": 4, "role": "q"},
            {
                "spec": rw.RopeSpec(8),
                "position": 4,
                "length": 64,
                "role": "k",
                "sparse": True,
                "dtype": torch.float32,
                "device": "meta",
            },
        )
    ],
    rw.load_spec: [
        (
            {"config": YARN_CONFIG},
            {
                "config": YARN_CONFIG | {"head_dim": 16},
                "pairing": "interleaved",
                "policy": "vllm",
                "angles": "exact",
            },
        )
    ],
    **{
        tables: [
            ({"dim_head": 8, "max_seq_len": 4}, {"dim_head": 16, "max_seq_len": 5, "base": 50.0, "device": "meta"})
        ]
        for tables in (rw.build_rotary_frequencies, reference.build_rotary_frequencies)
    },
    **{
        rotation: [({"x": X, "cos": COS, "sin": SIN}, {"x": X + 1, "cos": SIN, "sin": COS, "pairing": "half"})]
        for rotation in (rw.apply_rope, reference.apply_rope)
    },
    reference.learned: [
        ({"x": SHORT, "positions": IDS, "table": TABLE}, {"x": SHORT + 1, "positions": IDS + 1, "table": TABLE + 1})
    ],
    reference.multiplicative: [
        ({"x": SHORT, "positions": IDS, "table": TABLE}, {"x": SHORT + 1, "positions": IDS + 1, "table": TABLE + 1})
    ],
    reference.concatenated: [
        (
            {"x": SHORT, "positions": IDS, "table": TABLE},
            {"x": SHORT + 1, "positions": IDS + 1, "table": TABLE + 1, "projection": vector(4, 8, 16)},
        )
    ],
    reference.sinusoidal: [({"x": SHORT, "positions": IDS}, {"x": SHORT + 1, "positions": IDS + 1, "base": 50.0})],
    reference.sinusoidal_table: [({"positions": IDS, "dim": 8}, {"positions": IDS + 1, "dim": 6, "base": 50.0})],
    reference.recurrent: [
        (
            {"x": SHORT, "positions": IDS, "input_weight": WEIGHT, "state_weight": WEIGHT + 1, "bias": WEIGHT[0]},
            {
                "x": SHORT + 1,
                "positions": -IDS,
                "input_weight": WEIGHT * 2,
                "state_weight": WEIGHT,
                "bias": WEIGHT[1],
            },
        )
    ],
    reference.project: [
        (
            {"x": SHORT, "positions": IDS, "weight": WEIGHT, "encode": reference.sinusoidal},
            {
                "x": SHORT + 1,
                "positions": IDS + 1,
                "weight": WEIGHT + 1,
                "encode": lambda x, m: x,
                "placement": "projection",
            },
        ),
        (
            {"x": SHORT, "positions": IDS, "weight": WEIGHT, "encode": reference.sinusoidal, "placement": "scores"},
            {"placement": "input", "role": "v"},
        ),
    ],
    reference.t5_bucket: [
        (
            {"relative": torch.arange(-200, 200), "causal": True},
            {"relative": torch.arange(-300, 100), "causal": False, "num_buckets": 16, "max_distance": 64},
        )
    ],
    reference.t5_bias: [
        (
            {
                "q_positions": torch.arange(90),
                "k_positions": torch.arange(90),
                "weight": vector(5, 32, 2),
                "causal": True,
            },
            {
                "q_positions": torch.arange(90) + 1,
                "k_positions": torch.arange(90) + 1,
                "weight": vector(6, 32, 2),
                "causal": False,
                "max_distance": 64,
            },
        )
    ],
    reference.alibi_slopes: [({"num_heads": 4}, {"num_heads": 8})],
    reference.alibi_bias: [
        (
            {"q_positions": IDS, "k_positions": IDS, "num_heads": 4},
            {"q_positions": IDS + 1, "k_positions": IDS + 1, "num_heads": 8},
        )
    ],
    reference.softmax_attention: [
        (
            {"q": X, "k": X + 1, "v": X},
            {"q": X * 2, "k": X, "v": X + 1, "causal": True, "bias": vector(7, 5, 5), "scale": 1.0},
        )
    ],
    reference.multi_head_attention: [
        (
            {"x": SHORT, "weights": Projections(*[WEIGHT] * 4), "num_heads": 2, "embed": reference.sinusoidal},
            {
                "x": SHORT + 1,
                "weights": Projections(*[WEIGHT + 1] * 4),
                "num_heads": 4,
                "num_kv_heads": 4,
                "positions": IDS + 1,
                "causal": True,
                "embed": None,
                "encode_heads": lambda q, k, v, m: (q, k, 2 * v),
                "rotate": lambda q, k, m: (2 * q, k),
                "bias": lambda m, n: vector(8, 5, 5),
            },
        )
    ],
    elu_plus_one: [({"x": X}, {"x": X + 1})],
    reference.linear_attention_by_sum: [(LINEAR, LINEAR_CHANGES | {"bias": vector(9, 5, 5)}), UNDIVIDED],
    reference.linear_attention_by_recurrence: [(LINEAR, LINEAR_CHANGES), UNDIVIDED],
    reference.rotation_budget: [
        (
            {"reference": X, "dtype": torch.float64, "rotary_dim": 4},
            {
                "reference": X + 1,
                "dtype": torch.float32,
                "rotary_dim": 8,
                "pairing": "half",
                "rotary_slice": "trailing",
                "farthest": 1e9,
                "copied": False,
            },
        )
    ],
    reference.rms_norm: [
        ({"x": X}, {"x": X + 1, "weight": WEIGHT[0], "eps": 0.1}),
        ({"x": X, "weight": WEIGHT[0]}, {"plus_one": True}),
    ],
    reference.qk_norm_rotate: [
        (ROTATION | {"weight": None}, ROTATION_CHANGES | {"weight": WEIGHT[0], "eps": 0.1}),
        (ROTATION | {"weight": WEIGHT[0], "inv_freq": theta(4)}, {"plus_one": True, "rotary_slice": "trailing"}),
    ],
    rw.linear_attention: [
        (
            ATTENTION,
            {
                "q": X * 2,
                "k": X,
                "v": X,
                "rope": None,
                "positions": IDS * 2,
                "k_positions": IDS + 1,
                "key_mask": IDS.expand(2, 5) > 1,
                "feature_map": "relu",
                "causal": False,
                "decay": -torch.ones(3),
                "bias": rw.encoding("alibi", dim=24, num_heads=3),
                "normalize": False,
                "state": rw.linear_attention(**ATTENTION, return_state=True)[1],
                "return_state": True,
                "backend": "native",
            },
        ),
        ({name: x[:1] for name, x in ATTENTION.items() if name != "rope"}, {"cu_seqlens": torch.tensor([0, 2, 5])}),
        (ATTENTION | {"rope": DYNAMIC}, {"length": 64}),
        (ATTENTION | {"normalize": False}, {"scale": 0.5}),
    ],
    rw.linear_state: [
        (
            {name: x for name, x in ATTENTION.items() if name != "q"},
            {
                "k": X,
                "v": X,
                "rope": None,
                "positions": IDS * 2,
                "key_mask": IDS.expand(2, 5) > 1,
                "feature_map": "relu",
                "decay": -torch.ones(3),
                "bias": rw.encoding("alibi", dim=24, num_heads=3),
                "state": rw.linear_attention(**ATTENTION, return_state=True)[1],
                "backend": "native",
            },
        ),
        (
            {name: x[:1] for name, x in ATTENTION.items() if name in ("k", "v")},
            {"cu_seqlens": torch.tensor([0, 2, 5])},
        ),
        ({name: x for name, x in ATTENTION.items() if name != "q"} | {"rope": DYNAMIC}, {"length": 64}),
    ],
    rw.DistanceBias: [
        ({"slopes": torch.ones(3)}, {"slopes": torch.zeros(3), "numbers": torch.zeros(3, 1)}),
    ],
    rw.attention: [
        (
            SOFTMAX,
            {
                "q": X * 2,
                "k": X,
                "v": X,
                "encoding": None,
                "k_positions": IDS * 2,
                "q_positions": IDS + 1,
                "causal": False,
                "window": 2,
                "key_mask": IDS.expand(2, 5) > 1,
                "scale": 0.1,
                "return_lse": True,
            },
        ),
        (
            {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in SOFTMAX.items()},
            {"cu_seqlens": torch.tensor([0, 2, 5])},
        ),
    ],
    rw.qk_norm_rope: [
        (
            {"q": X, "k": X + 1, "q_weight": WEIGHT[0], "k_weight": WEIGHT[1], "rope": RotaryEmbedding(8)},
            {
                "q": X * X,
                "k": X,
                "q_weight": WEIGHT[1],
                "k_weight": None,
                "rope": RotaryEmbedding(8, pairing="half"),
                "eps": 0.1,
                "plus_one": True,
                "positions": IDS + 1,
                "offset": 3,
                "cu_seqlens": torch.tensor([0, 2, 5]),
                "angles": RotaryEmbedding(8).at(IDS + 1, dtype=torch.float64),
            },
        ),
        (
            {"q": X.bfloat16(), "k": X.bfloat16(), "q_weight": WEIGHT[0], "k_weight": None, "rope": RotaryEmbedding(8)},
            {"round_norm": True},
        ),
        (
            {
                "q": X,
                "k": X,
                "q_weight": None,
                "k_weight": None,
                "rope": RotaryEmbedding(rw.RopeSpec(8, rw.DynamicNTK(1e4, 2, 4))),
            },
            {"length": 99},
        ),
    ],
    reference.assert_within_budget: [
        (
            {"fast": X * (1 + 2.0**-45), "reference": X, "rotary_dim": 8},
            {"fast": X, "reference": X * (1 + 2.0**-46), "rotary_dim": 4, "pairing": "half", "farthest": 1e9},
        ),
        (
            {"fast": torch.cat((X[..., :4] * (1 + 2.0**-45), X[..., 4:]), -1), "reference": X, "rotary_dim": 4},
            {"rotary_slice": "trailing"},
        ),
        (
            {
                "fast": torch.cat((X[..., :4], X[..., 4:] * (1 + 2.0**-45)), -1),
                "reference": X,
                "rotary_dim": 4,
                "copied": False,
            },
            {"copied": True},
        ),
    ],
    theory.score_sum: [({"distance": 3, "inv_freq": [1.0, 0.1]}, {"distance": 4, "inv_freq": [1.0, 0.2]})],
    theory.partial_sums: [({"distance": 3, "inv_freq": [1.0, 0.1]}, {"distance": 4, "inv_freq": [1.0, 0.2]})],
    theory.decay_curve: [({"distance": 3, "inv_freq": [1.0, 0.1]}, {"distance": 4, "inv_freq": [1.0, 0.2]})],
    theory.band_means: [({"curve": np.arange(4.0), "edges": [0, 2]}, {"curve": np.ones(4), "edges": [0, 3]})],
    theory.abel_transform: [
        (
            {"products": H, "distance": 3, "inv_freq": [1.0, 0.1, 0.2]},
            {"products": H + 1, "distance": 4, "inv_freq": [1.0, 0.2, 0.3]},
        )
    ],
    theory.abel_bound: [
        (
            {"products": H, "distance": 3, "inv_freq": [1.0, 0.1, 0.2]},
            {"products": 2 * H, "distance": 4, "inv_freq": [1.0, 0.2, 0.3]},
        )
    ],
    theory.alibi_slopes: [({"num_heads": 4}, {"num_heads": 8})],
    theory.sinusoidal_table: [
        ({"positions": [3], "dim": 4, "base": 1e4}, {"positions": [4], "dim": 8, "base": 100.0}),
    ],
    theory.t5_buckets: [
        (
            {"relative": [-9, 40], "causal": True, "num_buckets": 16, "max_distance": 64},
            {"relative": [-7, 40], "causal": False, "num_buckets": 32, "max_distance": 9},
        )
    ],
    theory.periods: [({"inv_freq": [1.0]}, {"inv_freq": [2.0]})],
    theory.Band: [({"kind": "still", "first": 0, "last": 1}, {"kind": "between", "first": 1, "last": 2})],
    theory.rotations: [({"inv_freq": [1.0], "length": 9}, {"inv_freq": [2.0], "length": 8})],
    theory.plain_inv_freq: [
        (
            {"spec": rw.RopeSpec(8, rw.PositionInterpolation(1e4, 2))},
            {"spec": rw.RopeSpec(8, rw.PositionInterpolation(1e3, 2))},
        )
    ],
    theory.classify: [({"inv_freq": [1.0, 0.1], "plain": [1.0, 0.1]}, {"inv_freq": [1.0, 0.05], "plain": [1.0, 0.2]})],
    theory.bands: [({"inv_freq": [1.0, 0.1], "plain": [1.0, 0.1]}, {"inv_freq": [1.0, 0.05], "plain": [1.0, 0.2]})],
    theory.critical_dimension: [
        (
            {"rotary_dim": 128, "base": 1e4, "trained_length": 4096},
            {"rotary_dim": 64, "base": 5e5, "trained_length": 8192},
        )
    ],
    theory.critical_base: [
        ({"trained_length": 4096, "tuned_length": 8192}, {"trained_length": 2048, "tuned_length": 9000, "base": 5e5})
    ],
    theory.extrapolation_limit: [
        ({"base": 1e6, "rotary_dim": 128, "critical_dim": 92}, {"base": 1e5, "rotary_dim": 256, "critical_dim": 100})
    ],
    theory.small_base_thresholds: [({"tuned_length": 4096}, {"tuned_length": 8192})],
    theory.context_after_tuning: [
        (
            {"trained_length": 4096, "tuned_length": 8192, "new_base": 1e6, "rotary_dim": 128},
            {"trained_length": 2048, "tuned_length": 9000, "new_base": 500.0, "rotary_dim": 64, "base": 5e5},
        )
    ],
    theory.TunedContext: [
        (
            {name: value for name, (value, _) in TUNED.items()},
            {name: other for name, (_, other) in TUNED.items()},
        )
    ],
    theory.first_negative_distance: [
        ({"inv_freq": Plain(1e4).evaluate(128), "limit": 4096}, {"inv_freq": Plain(1e3).evaluate(128), "limit": 1000})
    ],
    theory.admissible_bases: [
        (
            {"bases": range(4290, 4300), "rotary_dim": 128, "length": 1024},
            {"bases": range(4296, 4300), "rotary_dim": 32, "length": 2048},
        )
    ],
    theory.lowest_admissible_base: [
        (
            {"bases": range(4290, 4300), "rotary_dim": 128, "length": 1024},
            {"bases": range(4296, 4300), "rotary_dim": 32, "length": 2048},
        )
    ],
}
