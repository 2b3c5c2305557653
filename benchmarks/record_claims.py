"""Measures the claims that take long and writes their records, which `ropewalk verify` cites.

`python benchmarks/record_claims.py` replaces src/ropewalk/data/claims/records.json.
"""

import json
import platform
import time
from datetime import date
from pathlib import Path

import torch

from ropewalk.claims import CHAPTERS, run

RECORDS = Path(__file__).parent.parent / "src" / "ropewalk" / "data" / "claims" / "records.json"


def main() -> None:
    records: dict[str, dict[str, object]] = {}
    for claim in (claim for chapter in CHAPTERS for claim in chapter.claims if claim.long):
        start = time.perf_counter()
        (entry,) = run([claim])
        if entry.contradicted or not entry.available:
            raise SystemExit(f"{claim.id}: {entry.finding.measured} does not support '{claim.verdict}'")
        finding = entry.finding
        records[claim.id] = {
            "measured": finding.measured,
            "stated": None if finding.stated is None else bool(finding.stated),
            "amended": bool(finding.amended),
            "method": claim.method,
            "date": date.today().isoformat(),
            "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(f"{claim.id}: {finding.measured}")
    RECORDS.write_text(json.dumps(records, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
