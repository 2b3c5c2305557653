"""`ropewalk plot` and its options. The code of a command is imported when the command is called."""

from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.tools.options import json_option

if TYPE_CHECKING:
    from ropewalk.tools.plot.command import Flags, Target

__all__ = ["plot"]

plot: typer.Typer = typer.Typer(
    help="""Plot decay, frequencies, rotation, biases and sinusoids.

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

    Left: the mean of |S_j|, the bound in RoFormer's figure 2. Right: the score of vectors whose pairs are parallel.
    Rules that depend on the length are evaluated at --length.

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
