"""`ropewalk plot` and its options. The code of a command is imported when the command is called."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ropewalk.tools.options import json_option

if TYPE_CHECKING:
    from ropewalk.tools.plot.command import Flags, Target

__all__ = ["plot"]


class _Pictures(TyperGroup):
    """The commands. The error for an unknown one lists those that exist."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and not ctx.resilient_parsing:
            from ropewalk.errors import require_choice

            require_choice(cmd_name, self.commands, asked="ropewalk plot")
        return super().get_command(ctx, cmd_name)


plot: typer.Typer = typer.Typer(
    cls=_Pictures,
    help="""Plot decay, frequencies, rotations, biases, and what notes show.

The input is one or more configs, or options that describe a rotation. The suffix of --out selects PNG, SVG (with
searchable text) or PDF. --json writes the numbers, with or without a picture. Needs neither weights nor torch.

\b
Examples:
  ropewalk plot decay --dim 128 --base 10000 --out decay.png
  ropewalk plot frequencies models/llama models/qwen --out periods.svg
  ropewalk plot bias --num-heads 12 --json -
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[str | None, typer.Option("--out", metavar="FILE.png|.svg|.pdf", help="Write the picture to this file.")]
Json = Annotated[str | None, json_option("the numbers as JSON")]
Title = Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Replace the title; '' for no title.")]
Dpi = Annotated[int | None, typer.Option("--dpi", metavar="N", help="Dots per inch of a PNG.  [default: 200]")]
Configs = Annotated[
    list[str] | None, typer.Argument(metavar="CONFIG", help="Paths of config.json files or model folders.")
]
Dim = Annotated[int | None, typer.Option("--dim", metavar="N", help="Rotated features per head.  [default: 128]")]
Base = Annotated[
    list[float] | None,
    typer.Option("--base", metavar="BASE", help="Base of the frequencies. May be repeated.  [default: 10000]"),
]
Rule = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="plain, pi, ntk, dynamic, by-parts, yarn or llama3. May be repeated.  [default: plain]",
    ),
]
Factor = Annotated[
    float | None, typer.Option("--factor", metavar="X", help="The factor by which a rule extends the trained length.")
]
Trained = Annotated[
    int | None, typer.Option("--trained-length", metavar="N", help="The trained length; some rules require it.")
]
UnknownPairing = Annotated[
    str | None,
    typer.Option("--pairing", metavar="half|interleaved", help="The pairing, if the model family is unknown."),
]
# The meaning and the default of --length depend on the command.
DecayLength = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="Distances below N.  [default: the trained length, at most 131072]"),
]
MarkedLength = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="Mark this length, and evaluate rules that depend on the length at it."),
]
RotationLength = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="Positions below N.  [default: the configured length, or 4096]"),
]
BiasLength = Annotated[int | None, typer.Option("--length", metavar="N", help="Distances below N.  [default: 256]")]
TableLength = Annotated[int, typer.Option("--length", metavar="N", help="The number of positions.")]
Pairs = Annotated[
    list[int] | None,
    typer.Option("--pair", metavar="I", help="Draw this pair. May be repeated.  [default: six pairs]"),
]
DrawnPairing = Annotated[
    str | None, typer.Option("--pairing", metavar="half|interleaved", help="Which features form a pair.")
]
BiasConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG", help="A config or model folder with ALiBi or T5's bias. Without it, both are plotted."
    ),
]
NumHeads = Annotated[
    int | None, typer.Option("--num-heads", metavar="N", help="The number of ALiBi heads.  [default: 8]")
]
Buckets = Annotated[int | None, typer.Option("--buckets", metavar="N", help="The number of T5 buckets.  [default: 32]")]
MaxDistance = Annotated[
    int | None,
    typer.Option("--max-distance", metavar="N", help="T5's last bucket has all distances from N on.  [default: 128]"),
]
TableDim = Annotated[int, typer.Option("--dim", metavar="N", help="The number of features.")]
TableBase = Annotated[float, typer.Option("--base", metavar="BASE", help="Base of the frequencies.")]
BoundDim = Annotated[int, typer.Option("--dim", metavar="N", help="The number of rotated features d.")]
BoundLength = Annotated[int, typer.Option("--length", metavar="N", help="Distances below N on logarithmic axes.")]
MatrixDim = Annotated[int, typer.Option("--dim", metavar="N", help="Rows and columns of the matrix, at most 12.")]
MatrixPosition = Annotated[int, typer.Option("--position", metavar="M", help="The position m.")]
MatrixPairing = Annotated[
    str, typer.Option("--pairing", metavar="half|interleaved", help="Which features form a pair.")
]
SplitHeads = Annotated[int, typer.Option("--num-heads", metavar="N", help="The number of heads, at most 16.")]
HeadDim = Annotated[int, typer.Option("--head-dim", metavar="N", help="The number of features of a head.")]
T5Buckets = Annotated[int, typer.Option("--buckets", metavar="N", help="The number of T5 buckets.")]
T5MaxDistance = Annotated[
    int, typer.Option("--max-distance", metavar="N", help="T5's last bucket has all distances from N on.")
]
T5Length = Annotated[int, typer.Option("--length", metavar="N", help="Distances below N.")]


def _target(out: str | None, json: str | None, title: str | None, dpi: int | None) -> "Target":
    from ropewalk.tools.plot.command import Target

    return Target(out, json, title, dpi)


def _flags(
    dim: int | None, base: list[float] | None, rule: list[str] | None, factor: float | None, trained: int | None
) -> "Flags":
    from ropewalk.tools.plot.curves import Flags

    return Flags(dim, tuple(base or ()), tuple(rule or ()), factor, trained)


@plot.command()
def decay(
    configs: Configs = None,
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    length: DecayLength = None,
    dim: Dim = None,
    base: Base = None,
    rule: Rule = None,
    factor: Factor = None,
    trained: Trained = None,
    pairing: UnknownPairing = None,
) -> None:
    """Plot scores against the distance, with means over bands.

    Left: the mean of |S_j|, the bound in RoFormer's figure 2. Right: the score of a query and a key whose pairs are
    parallel and of norm 1. Rules that depend on the length are evaluated at --length.

    \b
    Examples:
      ropewalk plot decay --base 10000 --base 500000 --length 8192 --out decay.svg
      ropewalk plot decay config.json --out decay.png
    """
    from ropewalk.tools.plot.command import plot_decay

    flags = _flags(dim, base, rule, factor, trained)
    raise typer.Exit(plot_decay(configs or (), _target(out, json, title, dpi), flags, length, pairing))


@plot.command()
def frequencies(
    configs: Configs = None,
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    length: MarkedLength = None,
    dim: Dim = None,
    base: Base = None,
    rule: Rule = None,
    factor: Factor = None,
    trained: Trained = None,
    pairing: UnknownPairing = None,
) -> None:
    """Plot the period of every pair and the trained length.

    A pair whose period exceeds the trained length completes no full rotation within it. The plot shows the scaled
    frequencies of a rule. Before scaling, more pairs complete a rotation.

    \b
    Examples:
      ropewalk plot frequencies --rule plain --rule pi --rule yarn \\
          --factor 8 --trained-length 4096 --out rules.png
      ropewalk plot frequencies models/llama models/qwen --out models.svg
    """
    from ropewalk.tools.plot.command import plot_frequencies

    flags = _flags(dim, base, rule, factor, trained)
    raise typer.Exit(plot_frequencies(configs or (), _target(out, json, title, dpi), flags, length, pairing))


@plot.command()
def rotation(
    configs: Configs = None,
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    length: RotationLength = None,
    pair: Pairs = None,
    pairing: DrawnPairing = None,
    dim: Dim = None,
    base: Base = None,
    rule: Rule = None,
    factor: Factor = None,
    trained: Trained = None,
) -> None:
    """Plot pairs as points that rotate with the position.

    The distance from the centre is the position. Positions beyond the trained length have another colour. If no point
    within the trained length has the same angle, the model never saw this angle in training.

    \b
    Examples:
      ropewalk plot rotation --trained-length 2048 --length 8192 --out spiral.png
      ropewalk plot rotation config.json --pair 0 --pair 40 --out rotation.svg
    """
    from ropewalk.tools.plot.command import plot_rotation

    flags = _flags(dim, base, rule, factor, trained)
    target = _target(out, json, title, dpi)
    raise typer.Exit(plot_rotation(configs or (), target, flags, length, pairing, pair or ()))


@plot.command()
def bias(
    config: BiasConfig = None,
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    num_heads: NumHeads = None,
    buckets: Buckets = None,
    max_distance: MaxDistance = None,
    length: BiasLength = None,
) -> None:
    """Plot what ALiBi and T5 add to scores, per head.

    T5 learns one number per bucket and head. If CONFIG is a folder with the weights (safetensors), the plot shows these
    numbers. Otherwise it shows which distances share a bucket, which is no score. A decoder uses all buckets for the
    keys before the query, an encoder half of them per direction.

    \b
    Examples:
      ropewalk plot bias --num-heads 12 --out bias.png
      ropewalk plot bias --buckets 64 --max-distance 256 --json buckets.json
    """
    from ropewalk.tools.plot.command import plot_bias

    raise typer.Exit(plot_bias(config, _target(out, json, title, dpi), num_heads, buckets, max_distance, length))


@plot.command()
def sinusoidal(
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    dim: TableDim = 64,
    base: TableBase = 10_000.0,
    length: TableLength = 128,
) -> None:
    """Plot the sinusoidal table as an image.

    \b
    Examples:
      ropewalk plot sinusoidal --dim 128 --length 256 --out table.png
    """
    from ropewalk.tools.plot.command import plot_sinusoidal

    raise typer.Exit(plot_sinusoidal(_target(out, json, title, dpi), dim, base, length))


@plot.command()
def bound(
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    dim: BoundDim = 128,
    base: TableBase = 10_000.0,
    length: BoundLength = 131_072,
) -> None:
    """Plot RoFormer's figure 2, and the same bound farther.

    Left: the axes of the paper, linear, distances 0 to 250. Right: logarithmic axes, with means over bands.

    \b
    Examples:
      ropewalk plot bound --length 4096 --out bound.png
    """
    from ropewalk.tools.plot.note_command import plot_bound

    raise typer.Exit(plot_bound(_target(out, json, title, dpi), dim, base, length))


@plot.command()
def score(out: Out = None, json: Json = None, title: Title = None, dpi: Dpi = None) -> None:
    """Plot the sum S(Δ) of note 002, stated and computed.

    S(Δ) = cos Δ + cos 0.3Δ + cos 0.05Δ. The distances 0, 2, 20 and 50 are marked with the sums that the note states and
    with the sums that are computed.

    \b
    Examples:
      ropewalk plot score --out score.png
    """
    from ropewalk.tools.plot.note_command import plot_score

    raise typer.Exit(plot_score(_target(out, json, title, dpi)))


@plot.command()
def matrix(
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    dim: MatrixDim = 8,
    position: MatrixPosition = 20,
    base: TableBase = 10_000.0,
    pairing: MatrixPairing = "interleaved",
) -> None:
    """Plot the rotation matrix of a position as an image.

    \b
    Examples:
      ropewalk plot matrix --dim 6 --position 3 --pairing half --out matrix.png
    """
    from ropewalk.tools.plot.note_command import plot_matrix

    raise typer.Exit(plot_matrix(_target(out, json, title, dpi), dim, position, base, pairing))


@plot.command()
def heads(
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    num_heads: SplitHeads = 8,
    head_dim: HeadDim = 64,
    base: TableBase = 10_000.0,
) -> None:
    """Plot the periods per head, rotated before or after the split.

    Left: d_model is rotated and then split into heads, so every head has a band of frequencies. Right: every head is
    rotated, so every head has all frequencies.

    \b
    Examples:
      ropewalk plot heads --num-heads 12 --out heads.png
    """
    from ropewalk.tools.plot.note_command import plot_heads

    raise typer.Exit(plot_heads(_target(out, json, title, dpi), num_heads, head_dim, base))


@plot.command()
def plane(out: Out = None, json: Json = None, title: Title = None, dpi: Dpi = None) -> None:
    """Plot vectors before and after their rotation by mθ.

    Left: a vector, the rotated vector, and the angle between them. Then a query and a key at two pairs of positions
    with the same distance: the angles differ, the score of the rotated vectors does not.

    \b
    Examples:
      ropewalk plot plane --out plane.png
    """
    from ropewalk.tools.plot.note_command import plot_plane

    raise typer.Exit(plot_plane(_target(out, json, title, dpi)))


@plot.command()
def t5(
    out: Out = None,
    json: Json = None,
    title: Title = None,
    dpi: Dpi = None,
    buckets: T5Buckets = 32,
    max_distance: T5MaxDistance = 128,
    length: T5Length = 256,
) -> None:
    """Plot T5's buckets, and a stated table of biases.

    T5 adds the bias to q·k, which it does not divide by √d. The table is an example, not a learned one: a bucket whose
    least distance is n has the bias -ln(1 + n). `ropewalk plot bias CONFIG` plots the biases that a model learned.

    \b
    Examples:
      ropewalk plot t5 --buckets 64 --max-distance 256 --out t5.png
    """
    from ropewalk.tools.plot.note_command import plot_t5

    raise typer.Exit(plot_t5(_target(out, json, title, dpi), buckets, max_distance, length))
