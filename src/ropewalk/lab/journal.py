"""Journal: losses of a run as JSON Lines, and for TensorBoard where it is installed."""

import importlib.util
import json
from pathlib import Path

from ropewalk.lab.ranks import on_rank_0, rank_and_ranks

__all__ = ["Journal"]


class Journal:
    """Losses of a run, which rank 0 writes to `folder`/losses.jsonl.

    A run that resumes keeps the lines up to its checkpoint: a killed run may have written more, or half a line.

    Args:
        folder: Folder of the run; None to write nothing.
        after: The step from which the run continues.
    """

    def __init__(self, folder: Path | None, *, after: int) -> None:
        self.path: Path | None = None if folder is None else folder / "losses.jsonl"
        self._lines: list[tuple[int, float | None]] = on_rank_0(lambda: self._kept(after))
        self._board = None
        if self.path is not None and rank_and_ranks()[0] == 0 and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self.path.parent / "tensorboard", purge_step=after + 1)

    def _kept(self, after: int) -> list[tuple[int, float | None]]:
        if self.path is None:
            return []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text(encoding="utf-8").splitlines() if after and self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= after]
        # Renamed, so that a run that is killed here loses no line.
        part = self.path.with_suffix(".part")
        part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        part.rename(self.path)
        return [(entry["step"], entry["loss"]) for entry in map(json.loads, kept)]

    def losses(self) -> list[tuple[float, float | None]]:
        """Steps and losses up to the step from which the run continues."""
        return list(self._lines)

    def add(self, step: int, loss: float | None, seconds: float) -> None:
        """Append a validation. The loss is None if it is not finite."""
        if self.path is None or rank_and_ranks()[0] != 0:
            return
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps({"step": step, "loss": loss, "seconds": round(seconds, 3)}), file=file)
        if self._board is not None and loss is not None:
            self._board.add_scalar("validation loss", loss, step)
            self._board.flush()
