"""Do the rows of the q and k projections of trained models tell which of them are a pair?

    python benchmarks/lab_pairing.py RUNS              (a folder of `ropewalk lab run --out`)
    python benchmarks/lab_pairing.py RUNS --models 40  (trains them there, and writes benchmarks/lab_pairing.json)

For every model with softmax attention it prints two figures. Each compares partners of the pairing "interleaved" with
partners of "half", and is divided by its spread over random permutations of the rows of a head: about 0 without a
pairing, positive for interleaved, negative for half. "norms": differences of the logarithms of the norms of two rows.
"products": squared cosines between a row of q and a row of k. With --models, one model per pairing and seed is trained
on text at the size micro, and the record has how often each figure told the pairing: a figure of at least THRESHOLD.
What is trained already is not trained again.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ropewalk.lab.conduct import performing
from ropewalk.lab.experiments.text import text_run
from ropewalk.lab.export import whole_state
from ropewalk.lab.run import Run, make_task
from ropewalk.lab.training import Settings, make_model, side_by_side
from ropewalk.tools.bench.records import write_record
from ropewalk.tools.output import processor

PERMUTATIONS = 2000
# Chosen with models of seeds 0 to 4, whose text and sizes are the same.
THRESHOLD = 3.0
FIRST_SEED = 100
ENCODINGS = {"interleaved": "rope", "half": "rope pairing=half"}
# Trained models, with their pairing, and models with random weights: seed and figures of each.
Cases = dict[str, list[dict[str, Any]]]
RECORD = Path(__file__).with_name("lab_pairing.json")


def relations(state: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """How related two rows are, [head_dim, head_dim] each, summed over heads and layers."""
    found = {name: torch.zeros(head_dim, head_dim) for name in ("norms", "products")}
    for name in [name for name in state if name.endswith("q_proj.weight")]:
        q, k = (state[name.replace("q_proj", x)].unflatten(0, (-1, head_dim)) for x in ("q_proj", "k_proj"))
        for heads in (q, k):
            norms = heads.norm(dim=2).log()
            found["norms"] -= (norms[:, :, None] - norms[:, None, :]).square().mean(0)
        cosines = torch.nn.functional.normalize(q, dim=2) @ torch.nn.functional.normalize(k, dim=2).mT
        found["products"] += (cosines.square() + cosines.square().mT).mean(0)
    return found


def score(related: Tensor) -> float:
    """Interleaved minus half, in standard deviations over random permutations of the rows."""
    rows = torch.arange(len(related))
    neighbours, halves = rows ^ 1, (rows + len(rows) // 2) % len(rows)

    def difference(x: Tensor) -> Tensor:
        return x[rows, neighbours].mean() - x[rows, halves].mean()

    generator = torch.Generator().manual_seed(0)
    orders = (torch.randperm(len(rows), generator=generator) for _ in range(PERMUTATIONS))
    spread = torch.stack([difference(related[order][:, order]) for order in orders]).std()
    return (difference(related) / spread).item()


def figures_of(state: Mapping[str, Tensor], head_dim: int) -> dict[str, float]:
    """Both figures of a model."""
    return {name: round(score(x), 2) for name, x in relations(state, head_dim).items()}


def guess(figure: float) -> str:
    """The pairing that a figure tells."""
    return "unknown" if abs(figure) < THRESHOLD else "interleaved" if figure > 0 else "half"


def trained(runs: Path) -> Iterator[tuple[Run, dict[str, float]]]:
    """The runs in a folder and the figures of their models."""
    for path in sorted(runs.glob("*/model/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        run = config["ropewalk_lab"]
        if run["attention"] == "softmax" and run["parent"] is None:
            yield Run(**run), figures_of(load_file(path.with_name("model.safetensors")), config["head_dim"])


def counts(cases: Cases) -> dict[str, dict[str, int]]:
    """How often each figure tells the pairing of trained models, and nothing of untrained ones."""
    counted: dict[str, dict[str, int]] = {}
    for figure in ("norms", "products"):
        told = [(guess(x[figure]), x["pairing"]) for x in cases["trained"]]
        counted[figure] = {
            "right": sum(one == other for one, other in told),
            "unknown": sum(one == "unknown" for one, _ in told),
            "wrong": sum(one not in (other, "unknown") for one, other in told),
            "unknown with random weights": sum(guess(x[figure]) == "unknown" for x in cases["random weights"]),
        }
    return counted


def missed(record: dict[str, Any]) -> list[str]:
    """Figures whose counts are not those of the cases."""
    counted = counts(record["cases"])
    return [
        f"{name}: {record['figures'].get(name)}" for name in counted if record["figures"].get(name) != counted[name]
    ]


def study(out: Path, models: int) -> None:
    """Train models, and record how often each figure tells their pairing, and that of as many untrained ones."""
    settings = Settings(torch.device("cpu"), every=600)
    plain = text_run("rope", "micro")
    seeds = range(FIRST_SEED, FIRST_SEED + models // len(ENCODINGS))
    runs = {
        dataclasses.replace(plain, encoding=encoding, seed=seed, lengths=()): pairing
        for seed in seeds
        for pairing, encoding in ENCODINGS.items()
    }
    cases: Cases = {"trained": [], "random weights": []}
    for index, (run, pairing) in enumerate(runs.items()):
        if not (out / run.key / "result.json").exists():
            side_by_side([performing(run, settings, out)], settings.device)
        # Parameters of an untrained model do not depend on the pairing, so each has a seed of its own.
        untrained = dataclasses.replace(plain, seed=FIRST_SEED + index)
        model = make_model(untrained, make_task(untrained))
        head_dim = model.size.dim // model.size.heads
        weights = load_file(out / run.key / "model" / "model.safetensors")
        cases["trained"].append({"pairing": pairing, "seed": run.seed, **figures_of(weights, head_dim)})
        cases["random weights"].append({"seed": untrained.seed, **figures_of(whole_state(model), head_dim)})
        print(*(of_kind[-1] for of_kind in cases.values()), flush=True)
        record = {
            "date": date.today().isoformat(),
            "hardware": f"{processor()}, one thread",
            "torch": str(torch.__version__),
            "command": f"python benchmarks/lab_pairing.py RUNS --models {models}",
            "run": {name: x for name, x in plain.as_json().items() if name not in ("encoding", "seed", "lengths")},
            "threshold": THRESHOLD,
            "models": len(cases["trained"]),
            "figures": counts(cases),
            "cases": cases,
        }
        write_record(record, str(RECORD), missed(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--models", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.models is not None:
        study(args.runs, args.models)
        return
    for run, figures in trained(args.runs):
        shown = ", ".join(f"{name} {value:+.1f}" for name, value in figures.items())
        print(f"{run.encoding}, seed {run.seed}, {run.steps} steps: {shown}")


if __name__ == "__main__":
    main()
