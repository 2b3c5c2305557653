"""`ropewalk plot` and its options. What a command does is imported when it is called."""

from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.tools.options import json_option

if TYPE_CHECKING:
    from ropewalk.tools.plot.command import Flags, Target

__all__ = ["plot"]

plot: typer.Typer = typer.Typer(
    help="""Draw decay, frequencies, rotation, biases, sinusoids.

Of configs, or of what flags say. A picture is PNG, SVG (its text is text) or PDF, by the ending of --out. --json writes
the numbers instead, or too. No weights and no torch are needed.

\b
Examples:
  ropewalk plot decay --dim 128 --base 10000 --out decay.png
  ropewalk plot frequencies models/llama models/qwen --out periods.svg
  ropewalk plot bias --num-heads 12 --json -
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[str | None, typer.Option("--out", metavar="FILE.png|.svg|.pdf", help="Where the picture goes.")]
Json = Annotated[str | None, json_option("the numbers")]
Title = Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Another heading; '' for none.")]
Dpi = Annotated[int | None, typer.Option("--dpi", metavar="N", help="Dots an inch of a PNG.  [default: 200]")]
Configs = Annotated[
    list[str] | None, typer.Argument(metavar="CONFIG", help="Paths of a config.json, or folders of models.")
]
Dim = Annotated[int | None, typer.Option("--dim", metavar="N", help="Features of a head that turn.  [default: 128]")]
Base = Annotated[
    list[float] | None,
    typer.Option("--base", metavar="BASE", help="Base of the frequencies. May be repeated.  [default: 10000]"),
]
Rule = Annotated[
    list[str] | None,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="plain, linear (PI), ntk, dynamic, by-parts, yarn or llama3. May be repeated.  [default: plain]",
    ),
]
Factor = Annotated[
    float | None, typer.Option("--factor", metavar="X", help="By how much a rule extends the trained length.")
]
Trained = Annotated[
    int | None, typer.Option("--trained-length", metavar="N", help="Positions in training; some rules need it.")
]
UnknownPairing = Annotated[
    str | None,
    typer.Option("--pairing", metavar="half|interleaved", help="For a config of a family that is not known."),
]
# --length has another default, and another meaning, per command.
DecayLength = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="Distances below N.  [default: the trained length, to 131072]"),
]
MarkedLength = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="Mark this length; rules that vary with it are taken there."),
]
RotationLength = Annotated[
    int | None,
    typer.Option("--length", metavar="N", help="Positions below N.  [default: the configured length, or 4096]"),
]
BiasLength = Annotated[int | None, typer.Option("--length", metavar="N", help="Distances below N.  [default: 256]")]
TableLength = Annotated[int, typer.Option("--length", metavar="N", help="Positions.")]
Pairs = Annotated[
    list[int] | None,
    typer.Option("--pair", metavar="I", help="Draw this pair. May be repeated.  [default: six of all]"),
]
DrawnPairing = Annotated[
    str | None, typer.Option("--pairing", metavar="half|interleaved", help="Which features are a pair.")
]
BiasConfig = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A config with ALiBi or T5's buckets. Without it, both.")
]
NumHeads = Annotated[int | None, typer.Option("--num-heads", metavar="N", help="Heads of ALiBi.  [default: 8]")]
Buckets = Annotated[int | None, typer.Option("--buckets", metavar="N", help="Buckets of T5.  [default: 32]")]
MaxDistance = Annotated[
    int | None, typer.Option("--max-distance", metavar="N", help="From where T5's last bucket.  [default: 128]")
]
TableDim = Annotated[int, typer.Option("--dim", metavar="N", help="Features.")]
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
    """Scores against the distance, with means of bands.

    On the left the mean of |S_j|, which RoFormer's figure 2 shows as a bound; on the right the score of vectors whose
    pairs are parallel. Rules that vary with the length are taken at --length.

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
    """The period of every pair, against the trained length.

    A pair whose period is longer than that does not finish a turn within it, by the frequencies that are drawn: where a
    rule scales them, those of before finished more.

    \b
    Examples:
      ropewalk plot frequencies --rule plain --rule linear --rule yarn \\
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
    """Pairs as points that turn with the position.

    Positions grow from the middle outwards; those past the trained length have another colour: where they stand at
    angles that no trained position has, the model never saw the like.

    \b
    Examples:
      ropewalk plot rotation --trained-length 2048 --length 8192 --out turns.png
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
    """ALiBi's bias of every head, and T5's buckets.

    T5 learns a number for each bucket and head; which distances share one is fixed, and is what is drawn. A decoder has
    all buckets for the keys before a query, an encoder half of them for each side.

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
    """The sinusoidal table as an image.

    \b
    Examples:
      ropewalk plot sinusoidal --dim 128 --length 256 --out table.png
    """
    from ropewalk.tools.plot.command import plot_sinusoidal

    raise typer.Exit(plot_sinusoidal(_target(out, json, title, dpi), dim, base, length))
