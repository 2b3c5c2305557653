"""Do the rows of the q and k projections of trained models tell which of them are a pair?

    python benchmarks/lab_pairing.py RUNS      (a folder of `ropewalk lab run --out`)

For every model with softmax attention it prints two figures. Each compares partners of the pairing "interleaved" with
partners of "half", and is divided by its spread over random permutations of the rows of a head: about 0 without a
pairing, positive for interleaved, negative for half. "norms": differences of the logarithms of the norms of two rows.
"products": squared cosines between a row of q and a row of k.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

PERMUTATIONS = 2000


def relations(folder: Path, head_dim: int) -> dict[str, Tensor]:
    """How related two rows are, [head_dim, head_dim] each, summed over heads and layers."""
    state = load_file(folder / "model.safetensors")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    for path in sorted(parser.parse_args().runs.glob("*/model/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        run = config["ropewalk_lab"]
        if run["attention"] != "softmax" or run["parent"] is not None:
            continue
        figures = {name: score(x) for name, x in relations(path.parent, config["head_dim"]).items()}
        shown = ", ".join(f"{name} {value:+.1f}" for name, value in figures.items())
        print(f"{run['encoding']}, seed {run['seed']}, {run['steps']} steps: {shown}")


if __name__ == "__main__":
    main()
