"""Sweep learning rates per encoding, with a seed that no experiment uses, and record the last validation losses.

    python benchmarks/record_rates.py --size micro [--device cuda] [--encodings rope alibi] [--attention softmax]

Adds the losses to src/ropewalk/data/lab/rates.json. What is recorded there is not measured again.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ropewalk.lab.decoder import AttentionName
from ropewalk.lab.experiments.text import ALL_ENCODINGS, text_run
from ropewalk.lab.rates import RATES
from ropewalk.lab.training import Settings, train

RECORD = Path(__file__).parents[1] / "src" / "ropewalk" / "data" / "lab" / "rates.json"
SEED = 1000
# The middle of the first three rates.
FIRST = {"micro": 8e-3, "tiny": 4e-3, "small": 1e-3}
LINEAR = ("rope", "sinusoidal", "none", "alibi", "t5")


def loss(size: str, attention: AttentionName, encoding: str, rate: float, device: str) -> float:
    """The last validation loss with this rate, at most 99: a rate with which training fails has it too."""
    if device == "cpu":
        torch.set_num_threads(1)
    run = dataclasses.replace(text_run(encoding, size, attention=attention), rate=rate, seed=SEED, lengths=())
    settings = Settings(torch.device(device), "bfloat16" if device == "cuda" else "float32", every=run.steps)
    return min(train(run, settings)[1].final_loss or 99.0, 99.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="micro")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--encodings", nargs="+", default=ALL_ENCODINGS)
    parser.add_argument("--attention", nargs="+", default=("softmax", "linear"))
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = args.jobs if args.device == "cpu" else 1
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        while cases := missing(record, args.size, args.encodings, args.attention):
            futures = {case: pool.submit(loss, args.size, *case, args.device) for case in cases}
            for (attention, encoding, rate), future in futures.items():
                value = round(future.result(), 5)
                print(f"{args.size} {attention} {encoding} {rate:g}: {value:.4f}", flush=True)
                losses = record.setdefault(args.size, {}).setdefault(attention, {}).setdefault(encoding, {})
                losses[f"{rate:g}"] = value
                args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def missing(
    record: dict[str, Any], size: str, chosen: Sequence[str], kinds: Sequence[str]
) -> list[tuple[AttentionName, str, float]]:
    """Attention, encoding and rate to measure next: the first rates, and then the neighbours of the best."""
    cases: list[tuple[AttentionName, str, float]] = []
    every: tuple[tuple[AttentionName, tuple[str, ...]], ...] = (("softmax", ALL_ENCODINGS), ("linear", LINEAR))
    for attention, encodings in every:
        for encoding in encodings:
            if encoding not in chosen or str(attention) not in kinds:
                continue
            losses = record.get(size, {}).get(attention, {}).get(encoding, {})
            best = RATES.index(float(min(losses, key=losses.__getitem__))) if losses else RATES.index(FIRST[size])
            near = RATES[max(0, best - 1) : best + 2]
            cases.extend((attention, encoding, rate) for rate in near if f"{rate:g}" not in losses)
    return cases


if __name__ == "__main__":
    main()
