"""Mathematical properties of rotary encodings: sums, bounds and lengths, in NumPy float64."""

from ropewalk.theory.bands import KINDS as KINDS
from ropewalk.theory.bands import Band as Band
from ropewalk.theory.bands import bands as bands
from ropewalk.theory.bands import classify as classify
from ropewalk.theory.bands import plain_inv_freq as plain_inv_freq
from ropewalk.theory.bands import rotations as rotations
from ropewalk.theory.context import TunedContext as TunedContext
from ropewalk.theory.context import admissible_bases as admissible_bases
from ropewalk.theory.context import context_after_tuning as context_after_tuning
from ropewalk.theory.context import critical_base as critical_base
from ropewalk.theory.context import critical_dimension as critical_dimension
from ropewalk.theory.context import extrapolation_limit as extrapolation_limit
from ropewalk.theory.context import first_negative_distance as first_negative_distance
from ropewalk.theory.context import lowest_admissible_base as lowest_admissible_base
from ropewalk.theory.context import periods as periods
from ropewalk.theory.context import small_base_thresholds as small_base_thresholds
from ropewalk.theory.decay import BAND_EDGES as BAND_EDGES
from ropewalk.theory.decay import abel_bound as abel_bound
from ropewalk.theory.decay import abel_transform as abel_transform
from ropewalk.theory.decay import band_means as band_means
from ropewalk.theory.decay import decay_curve as decay_curve
from ropewalk.theory.decay import partial_sums as partial_sums
from ropewalk.theory.decay import score_sum as score_sum
from ropewalk.theory.encodings import alibi_slopes as alibi_slopes
from ropewalk.theory.encodings import sinusoidal_table as sinusoidal_table
from ropewalk.theory.encodings import t5_buckets as t5_buckets

__all__ = [
    "BAND_EDGES",
    "KINDS",
    "Band",
    "TunedContext",
    "abel_bound",
    "abel_transform",
    "admissible_bases",
    "alibi_slopes",
    "band_means",
    "bands",
    "classify",
    "context_after_tuning",
    "critical_base",
    "critical_dimension",
    "decay_curve",
    "extrapolation_limit",
    "first_negative_distance",
    "lowest_admissible_base",
    "partial_sums",
    "periods",
    "plain_inv_freq",
    "rotations",
    "score_sum",
    "sinusoidal_table",
    "small_base_thresholds",
    "t5_buckets",
]
