"""Converts checkpoints from one pairing to the other: permutes q and k, copies everything else, writes atomically."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ropewalk.errors import RopewalkError, require_choice, shown
from ropewalk.hub.configs.keys import Caller, Keys
from ropewalk.hub.configs.language import KEY, Record, has_known_family, read_record, require_rope
from ropewalk.hub.configs.parse import Config, parse_config
from ropewalk.hub.convert.checkpoint import (
    INDEX,
    Checkpoint,
    Shard,
    blocks_of,
    is_weights,
    read_checkpoint,
    tensor_blocks,
)
from ropewalk.hub.convert.config_file import CONFIG, converted_config, read_config_file
from ropewalk.hub.convert.folders import atomic_folder, require_writable, write_file
from ropewalk.hub.convert.model_folder import ModelFolder
from ropewalk.hub.convert.permutation import Plan, permuted_blocks, plan_of
from ropewalk.hub.convert.proof import Proof, prove
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["Conversion", "Progress", "UnprovenError", "convert_checkpoint", "convert_for", "verify_conversion"]

# Called with the name of the stage, the bytes processed so far, and the total number of bytes.
Progress = Callable[[str, int, int], None]
# Pitfalls of a config that affect which rows are permuted.
_NOTED = ("unknown-family", "partial-truncated")


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        model: The folder of the source.
        out: The folder that was written.
        model_type: The model_type of the config.
        converted_from: The pairing of the source's weights.
        to: The pairing of the converted weights.
        model_code: The pairing that the code of the model, such as that in transformers, uses for the output. If it is
            not `to`, the output is for other stacks.
        permuted: The names of the tensors whose rows were permuted: those of q and k.
        tensors: The number of tensors in the checkpoint.
        still: The layers that do not rotate.
        nbytes: The number of bytes of the weights.
        left_out: The files and folders that were not copied.
        notes: Notes about the config that affect the conversion.
        proof: The proof of the conversion. None if it was not requested.

    >>> pairings = ("half", "interleaved", "half")
    >>> conversion = Conversion(Path("model"), Path("out"), "llama", *pairings, ("q", "k"), 9, (), 64, (), (), None)
    >>> conversion.converted_from, conversion.to, conversion.as_json()["tensors"]
    ('half', 'interleaved', 9)
    """

    model: Path
    out: Path
    model_type: str | None
    converted_from: Pairing
    to: Pairing
    model_code: Pairing
    permuted: tuple[str, ...]
    tensors: int
    still: tuple[str, ...]
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    proof: Proof | None

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON-serializable data."""
        return {
            "model": str(self.model),
            "out": str(self.out),
            "model_type": self.model_type,
            "from": self.converted_from,
            "to": self.to,
            "model_code": self.model_code,
            "bytes": self.nbytes,
            "tensors": self.tensors,
            "permuted": list(self.permuted),
            "without_rotation": list(self.still),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "proof": None if self.proof is None else self.proof.as_json(),
        }


class UnprovenError(Exception):
    """The output of a conversion is wrong. It was removed.

    Attributes:
        proof: The proof, which lists the tensors and layers that are wrong.

    >>> str(UnprovenError(Proof((), 3, ("layers.0.q_proj.weight",))))
    'wrong tensors or layers after the conversion: 1, such as layers.0.q_proj.weight'
    """

    def __init__(self, proof: Proof) -> None:
        self.proof: Proof = proof
        wrong = [*proof.differing, *(layer.layer for layer in proof.layers if not layer.equal)]
        names = ", ".join(wrong[:5])
        super().__init__(f"wrong tensors or layers after the conversion: {len(wrong)}, such as {names}")


@dataclass(frozen=True)
class _Source:
    """A model before its conversion. `text` is its config.json, decoded as Latin-1: one character per byte."""

    checkpoint: Checkpoint
    config: Config
    text: str
    pairing: Pairing
    plan: Plan


@dataclass(frozen=True)
class _OtherFiles:
    """The files of a model's folder that are not shards.

    `files` are copied and have `nbytes` bytes, `modes` are the permissions of their folders, `left_out` is not copied.
    """

    files: tuple[str, ...]
    nbytes: int
    modes: dict[str, int]
    left_out: tuple[str, ...]


def convert_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    to: Pairing,
    from_pairing: Pairing | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint in the folder `model` to the pairing `to`, and write it to the folder `out`.

    Within the d rotated features of a head, pair i is (2i, 2i + 1) if interleaved and (i, i + d/2) if half. The rows of
    the q and k projections, their biases and the weights of their norms are permuted to that order, head by head. The
    scores q·k do not depend on an order that q and k share (RoFormer, 2104.09864, eq. 15). Bytes are moved; nothing is
    computed or rounded.

    All other tensors and files are copied. In config.json at most two keys change: the record of the conversion and a
    flag of the family. All other bytes stay the same, so a conversion and its inverse restore every file byte for byte.
    The exception is a record that config.json contained before the first conversion: it is not restored.

    Only safetensors files are read, one block at a time. Quantized weights raise an error. `out` is written completely
    or not at all, and the source is never written to. Links are followed inside the folder of the model and, in the
    cache of a hub, to the blobs of the same model. Links to other places, FIFOs, sockets and devices raise an error. No
    file or folder of `out` has wider permissions than its source.

    Args:
        model: A folder with config.json and safetensors files.
        out: The folder to write. It must not exist.
        to: The pairing of the output.
        from_pairing: The pairing of the weights in `model`. Defaults to that of the family, or to that of the record
            that an earlier conversion wrote to config.json. Required for an unknown family without a record.
        verify: Whether to prove the output before it is renamed to `out`, as `verify_conversion` does.
        progress: Called with the name of the stage, the bytes processed so far, and the total number of bytes.

    Returns:
        The result of the conversion.

    Raises:
        RopewalkError: If the checkpoint cannot be converted, or `out` cannot be written.
        UnprovenError: If the proof fails. The output is removed.

    >>> import json, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import load_file, save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "model").mkdir()
    >>> config = {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> _ = (folder / "model" / "config.json").write_text(json.dumps(config))
    >>> name, rows = "model.layers.0.self_attn.{}_proj.weight", np.arange(16.0).reshape(4, 4)
    >>> save_file({name.format(role): rows for role in "qkv"}, folder / "model" / "model.safetensors")
    >>> convert_checkpoint(folder / "model", folder / "out", to="interleaved", verify=True).proof.holds
    True
    >>> load_file(folder / "out" / "model.safetensors")[name.format("q")][:, 0].tolist()
    [0.0, 8.0, 4.0, 12.0]
    """
    caller = Caller("convert_checkpoint")
    return convert_for(caller, model, out, to=to, from_pairing=from_pairing, verify=verify, progress=progress)


def convert_for(
    caller: Caller,
    model: str | Path,
    out: str | Path,
    *,
    to: str,
    from_pairing: str | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """`convert_checkpoint` with errors that name `caller` and its options."""
    target_pairing = _require_pairing(to, caller, "to")
    target = Path(out)
    report = progress or _no_progress
    checkpoint = read_checkpoint(ModelFolder(Path(model)))
    folder = checkpoint.model.path
    source = _read_source(caller, checkpoint, from_pairing)
    others = _other_files(checkpoint)
    weights = sum(shard.nbytes for shard in checkpoint.shards)
    require_writable(target, folder, weights + others.nbytes)
    if source.pairing == target_pairing:
        raise RopewalkError(
            asked=f"convert {str(folder)!r} to {to!r}",
            expected="weights in the other pairing",
            got=f"weights that are already {to!r}",
            do=f"use the model without a conversion, or convert it to {next(p for p in PAIRINGS if p != to)!r}",
        )
    config, model_code = converted_config(source.text, source.config, source.pairing, target_pairing)
    proof = None
    with atomic_folder(target, others.modes) as partial:
        for name in others.files:
            with checkpoint.model.open(name) as file:
                # Copies the current size only: a file that grows while it is copied would never end.
                blocks = blocks_of(file, folder / name, os.fstat(file.fileno()).st_size)
                blocks = iter([config.encode("latin-1")]) if name == CONFIG else blocks
                write_file(partial / name, blocks, _mode(file))
        written = 0
        for shard in checkpoint.shards:
            with checkpoint.model.open(shard.name) as file:
                blocks = _reported(_shard_blocks(file, shard, source.plan, target_pairing), written, weights, report)
                write_file(partial / shard.name, blocks, _mode(file))
            written += shard.nbytes
        if verify:
            proof = _prove(source, ModelFolder(partial), target_pairing, report)
            if not proof.holds:
                raise UnprovenError(proof)
    pitfalls = dict.fromkeys(source.config.pitfalls)
    return Conversion(
        model=folder,
        out=target,
        model_type=source.config.model_type,
        converted_from=source.pairing,
        to=target_pairing,
        model_code=model_code,
        permuted=tuple(source.plan.parts),
        tensors=len(checkpoint.tensors),
        still=source.plan.still,
        nbytes=weights,
        left_out=others.left_out,
        notes=tuple(text for name, text in pitfalls if name in _NOTED),
        proof=proof,
    )


def _other_files(checkpoint: Checkpoint) -> _OtherFiles:
    """List the files that are not shards. Left out: other weights, folders that begin with a dot, links to folders."""
    files: list[str] = []
    left_out: list[str] = []
    nbytes, modes = 0, {"": checkpoint.model.mode}
    folders: dict[str, int] = {}
    shards = {shard.name for shard in checkpoint.shards}
    for entry in checkpoint.model.entries():
        if entry.folder:
            if entry.link or os.path.basename(entry.name).startswith("."):
                left_out.append(f"{entry.name}/")
            else:
                folders[entry.name] = stat.S_IMODE((checkpoint.model.path / entry.name).stat().st_mode)
        elif entry.name in shards:
            continue
        elif is_weights(entry.name) and not (checkpoint.index and entry.name == INDEX):
            left_out.append(entry.name)
        else:
            with checkpoint.model.open(entry.name) as file:
                nbytes += os.fstat(file.fileno()).st_size
            files.append(entry.name)
            # Folders without a copied file are not created.
            parents = [str(parent) for parent in reversed(Path(entry.name).parents) if parent != Path()]
            modes |= {parent: folders[parent] for parent in parents}
    return _OtherFiles(tuple(files), nbytes, modes, tuple(left_out))


def _mode(file: BinaryIO) -> int:
    return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def _require_pairing(pairing: str, caller: Caller, name: str) -> Pairing:
    require_choice(pairing, PAIRINGS, asked=caller.asked_with(name, pairing))
    return "half" if pairing == "half" else "interleaved"


def _no_progress(stage: str, processed: int, total: int) -> None:
    """Ignore the progress."""


def verify_conversion(model: str | Path, converted: str | Path, *, progress: Progress | None = None) -> Proof:
    """Check that the folder `converted` is a correct conversion of the folder `model`.

    For every layer that rotates, attention scores of random inputs at random positions are computed in float64, from
    each checkpoint with its own pairing. They must agree within 1e-12 of |q| |k|. For every tensor, the bytes of the
    two checkpoints are compared, after the permutation for those of q and k.

    Args:
        model: The folder that was converted.
        converted: The folder that the conversion wrote.
        progress: Called with the name of the stage, the bytes processed so far, and the total number of bytes.

    Returns:
        The proof. `Proof.holds` is the result.

    Raises:
        RopewalkError: If a folder cannot be read, or if neither config contains the record of a conversion.

    >>> import json, tempfile
    >>> import numpy as np
    >>> from safetensors.numpy import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "model").mkdir()
    >>> config = {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> _ = (folder / "model" / "config.json").write_text(json.dumps(config))
    >>> weights = {f"model.layers.0.self_attn.{role}_proj.weight": np.eye(4) for role in "qkv"}
    >>> save_file(weights, folder / "model" / "model.safetensors")
    >>> _ = convert_checkpoint(folder / "model", folder / "out", to="interleaved")
    >>> verify_conversion(folder / "model", folder / "out").holds
    True
    """
    caller = Caller("verify_conversion")
    folders = ModelFolder(Path(model)), ModelFolder(Path(converted))
    before, after = (read_record(Keys(read_config_file(folder, caller)[1], caller=caller)) for folder in folders)
    if after is not None:
        to, pairing = after.pairing, after.converted_from
    elif before is not None:
        # The model was converted back, which removes the record.
        to, pairing = before.converted_from, before.pairing
    else:
        raise RopewalkError(
            asked=f"verify_conversion({str(model)!r}, {str(converted)!r})",
            expected=f"a record of the conversion, the key {KEY!r}, in one of the two configs",
            got="no record in either config",
            do="pass the folder that was converted, then the folder that ropewalk convert wrote",
        )
    source = _read_source(caller, read_checkpoint(folders[0]), pairing)
    return _prove(source, folders[1], to, progress or _no_progress)


def _prove(source: _Source, converted: ModelFolder, to: Pairing, report: Progress) -> Proof:
    total, verified = sum(tensor.nbytes for tensor in source.checkpoint.tensors.values()), 0

    def advance(nbytes: int) -> None:
        nonlocal verified
        verified += nbytes
        report("verifying", verified, total)

    return prove(source.checkpoint, read_checkpoint(converted), source.plan, (source.pairing, to), advance)


def _read_source(caller: Caller, checkpoint: Checkpoint, from_pairing: str | None) -> _Source:
    """Read the config of a checkpoint and plan what to permute."""
    specified = None if from_pairing is None else _require_pairing(from_pairing, caller, "from_pairing")
    text, data = read_config_file(checkpoint.model, caller)
    config = _parse(caller, data, specified)
    record = config.language.record
    # Layer types differ in their frequencies, but never in their pairing.
    rotating = [spec for spec in config.layers.values() if spec is not None]
    pairing = rotating[0].pairing if rotating else config.language.family.pairing
    if specified is not None and specified != pairing:
        other = Record(specified, pairing, pairing if record is None else record.model_code)
        raise RopewalkError(
            asked=f"convert {str(checkpoint.model.path)!r} from {from_pairing!r}",
            expected=f"{pairing!r}, {'the pairing of its family' if record is None else 'as recorded in config.json'}",
            got=repr(from_pairing),
            do="leave it out; if another program permuted the weights, add this record to config.json:"
            f' "{KEY}": {json.dumps(other.as_dict())}',
        )
    return _Source(checkpoint, config, text, pairing, plan_of(checkpoint, config))


def _parse(caller: Caller, data: dict[str, Any], from_pairing: Pairing | None) -> Config:
    """Parse the config of a checkpoint. `from_pairing` is only used for an unknown family."""
    require_rope(data, caller)
    keys = Keys(data, caller=caller)
    known = read_record(keys) is not None or has_known_family(keys)
    if not known and from_pairing is None:
        half, interleaved = (caller.option("from_pairing", pairing) for pairing in ("half", "interleaved"))
        raise RopewalkError(
            asked=caller.asked(f"a model with model_type {shown(data.get('model_type'))}"),
            expected=f"a model_type that ropewalk knows, or {caller.option('from_pairing')}",
            got="an unknown model_type and no pairing; configs do not specify which features form a pair",
            do=f"add {half} if its code rotates two halves (rotate_half), {interleaved} otherwise",
        )
    return parse_config(data, caller, pairing=None if known else from_pairing)


def _shard_blocks(file: BinaryIO, shard: Shard, plan: Plan, to: Pairing) -> Iterator[bytes]:
    """Yield the bytes of a converted shard: its unchanged header, then each tensor."""
    yield file.read(shard.header)
    for name, tensor in shard.tensors.items():
        part = plan.parts.get(name)
        yield from tensor_blocks(file, tensor) if part is None else permuted_blocks(file, tensor, part, to)


def _reported(blocks: Iterator[bytes], written: int, total: int, report: Progress) -> Iterator[bytes]:
    """Yield the blocks of a shard, and report the progress after each one is written."""
    for block in blocks:
        yield block
        written += len(block)
        report("writing", written, total)
