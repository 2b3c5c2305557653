"""All three forms of the rotation raise errors in four parts for invalid arguments."""

import math

import numpy as np
import pytest
import torch

from ropewalk import RopeSpec, RopewalkError
from ropewalk.reference import rotate, rotate_complex, rotate_matrix
from strategies import theta

X = torch.ones(2, 3, 5, 8)
IDS = torch.arange(5)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("form", [rotate, rotate_complex, rotate_matrix])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pairing": "neox"},
            r"\(pairing=...\)\nexpected: 'interleaved' or 'half'\ngot:      'neox'\ndo this:  use .half",
        ),
        ({"rotary_slice": "lead"}, "did you mean 'leading'"),
        ({"amplitude": math.nan}, "a finite number"),
        ({"amplitude": "1"}, "a finite number"),
        ({"x": torch.ones(2, 3, 5, 8, dtype=torch.int64)}, "a floating-point tensor"),
        ({"x": torch.ones(2, 3, 5, 8, dtype=torch.complex64)}, "a floating-point tensor"),
        ({"x": torch.ones(8)}, "2 or more dimensions"),
        ({"x": torch.ones(5, 7)}, "between 1 and 3 frequencies, for 7 features\ngot:      4"),
        ({"inv_freq": theta(16)}, "between 1 and 4 frequencies"),
        ({"inv_freq": torch.ones(0)}, "between 1 and 4 frequencies"),
        ({"inv_freq": torch.tensor([1.0, math.nan])}, "finite inv_freq"),
        ({"inv_freq": torch.ones(1, 4)}, r"\[heads, pairs\] for x of shape"),
        ({"positions": torch.tensor([[0.0, 1.0, 2.0, 3.0, math.nan]] * 2)}, "finite positions"),
        ({"inv_freq": torch.ones(2, 4)}, r"\[heads, pairs\] for x of shape \[batch, heads, seq, dim\]"),
        ({"inv_freq": torch.ones(5, 4), "x": torch.ones(5, 8)}, r"\[heads, pairs\]"),
        ({"inv_freq": torch.ones(2, 4), "x": torch.ones(2, 5, 8), "positions": torch.ones(2, 5)}, r"\[heads, pairs\]"),
        ({"inv_freq": torch.ones(1, 3, 4)}, r"\[heads, pairs\]"),
        ({"positions": torch.tensor([0.0, 1.0, math.nan, 3.0, 4.0])}, "finite positions\ngot:      NaN"),
        ({"positions": torch.tensor([0.0, 1.0, math.inf, 3.0, 4.0])}, "finite positions"),
        (
            {"positions": torch.arange(4)},
            r"shape \[5\] or \[2, 5\], for x of shape \[2, 3, 5, 8\]\ngot:      torch.int64",
        ),
        ({"positions": torch.zeros(3, 5)}, r"shape \[5\] or \[2, 5\]"),
        ({"positions": torch.zeros(2, 3, 5)}, r"shape \[5\] or \[2, 5\]"),
        ({"positions": torch.tensor(3)}, r"shape \[5\] or \[2, 5\]"),
        ({"positions": torch.ones(5, dtype=torch.bool)}, "integers, float32 or float64"),
        ({"positions": torch.arange(5).bfloat16()}, "integers, float32 or float64"),
        ({"positions": [0, 1, 2, 3, 4]}, "a torch.Tensor"),
        ({"x": np.ones((5, 8))}, "a torch.Tensor"),
        ({"inv_freq": theta(8).bfloat16()}, "inv_freq in float64 or float32"),
        ({"inv_freq": theta(8).int()}, "inv_freq in float64 or float32"),
        ({"inv_freq": RopeSpec(8)}, "inv_freq in float64 or float32"),
        ({"conjugate": "no"}, "True or False"),
        ({"positions": torch.zeros(1, 5), "x": torch.ones(5, 8)}, r"of shape \[5\], for x"),
    ],
)
def test_bad_input(form, change, message):
    arguments = {"x": X, "positions": IDS, "inv_freq": theta(8)} | change
    with pytest.raises(RopewalkError, match=message):
        form(**arguments)
