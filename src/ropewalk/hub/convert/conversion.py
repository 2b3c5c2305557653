"""Checkpoints from one pairing to the other: q and k permuted, all else as it was, written whole or not at all."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ropewalk.errors import RopewalkError, require_choice, shown
from ropewalk.hub.configs.keys import Caller, Keys
from ropewalk.hub.configs.language import KEY, Record, has_known_family, read_record, refuse_without_rope
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
from ropewalk.hub.convert.folders import require_room, whole_folder, write_file
from ropewalk.hub.convert.model_folder import ModelFolder
from ropewalk.hub.convert.permutation import Plan, permuted_blocks, plan_of
from ropewalk.hub.convert.proof import Proof, prove
from ropewalk.spec.rope import PAIRINGS, Pairing

__all__ = ["Conversion", "Progress", "UnprovenError", "convert_checkpoint", "convert_for", "verify_conversion"]

# What is done, how many bytes of it are done, and of how many.
Progress = Callable[[str, int, int], None]
# Warnings about a config that matter to which rows are permuted.
_TOLD = ("unknown-family", "partial-truncated")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    `model_code` is the pairing in which the family's own code, such as that of transformers, rotates the output: where
    it is not `to`, the output is for other stacks. `permuted` are the tensors of q and k, `still` the layers that do
    not rotate, `left_out` the files that were not copied.

    >>> pairings = ("half", "interleaved", "half")
    >>> done = Conversion(Path("model"), Path("out"), "llama", *pairings, ("q", "k"), 9, (), 64, (), (), None)
    >>> done.converted_from, done.to, done.as_json()["tensors"]
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
        """All of it, as JSON stores it."""
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
    """A conversion whose output is not what it must be, with the proof that says where. Nothing of it is kept.

    >>> str(UnprovenError(Proof((), 3, ("layers.0.q_proj.weight",))))
    '1 tensors or layers are not what they must be: layers.0.q_proj.weight'
    """

    def __init__(self, proof: Proof) -> None:
        self.proof: Proof = proof
        wrong = [*proof.differing, *(layer.layer for layer in proof.layers if not layer.equal)]
        super().__init__(f"{len(wrong)} tensors or layers are not what they must be: {', '.join(wrong[:5])}")


@dataclass(frozen=True)
class _Source:
    """A model that was read and planned, with nothing written yet: its config, with its text, a character per byte, and
    the pairing of its weights."""

    checkpoint: Checkpoint
    config: Config
    text: str
    pairing: Pairing
    plan: Plan


@dataclass(frozen=True)
class _Others:
    """What a model's folder has beside its shards: files to copy, their bytes, the folders that they are in with their
    permissions, and the names of what is left out."""

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
    """Writes the checkpoint in the folder `model` to the folder `out` in the pairing `to`.

    Within the features that rotate, pair i of d/2 is (2i, 2i + 1) or (i, i + d/2). The rows of the q and k projections,
    their biases and the weights of their norms are put in that order, head by head; scores q·k do not see an order that
    both share (RoFormer, 2104.09864, eq. 15). Bytes are moved and nothing is computed. All else is copied as it is; in
    config.json two members may change, the record of the conversion and a flag of the family, and every other byte is
    the same. So a conversion and its inverse give the same files, byte for byte. (Where config.json had a record before
    the first of the two, that one is not written again.)

    Only safetensors are read, a block at a time, and quantised weights are refused. Whatever happens, `out` is there
    whole or not at all, and the source is never written. Links are followed inside of the model's folder and, in the
    cache of a hub, to the blobs of the same model; a link that leads elsewhere is refused, and so are FIFOs, sockets
    and devices. No file or folder of `out` has wider permissions than the one that it was made from.

    Args:
        model: A folder with config.json and safetensors.
        out: The folder to write, which must not be there yet.
        to: The pairing that `out` is to have.
        from_pairing: The pairing of the weights in `model`. By default that of the family, or of the record that an
            earlier conversion left in config.json; where neither says it, it must be passed.
        verify: Whether to prove the output before it gets its name, as `verify_conversion` does.
        progress: Is called with what is done, how many bytes of it are done, and of how many.

    Returns:
        What was done.

    Raises:
        RopewalkError: A checkpoint that cannot be converted, or a folder that cannot be written.
        UnprovenError: The proof failed, and nothing is left.

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
    """`convert_checkpoint` for a caller, in whose words errors are written."""
    wanted = _require_pairing(to, caller, "to")
    target = Path(out)
    tell = progress or _tell_nobody
    checkpoint = read_checkpoint(ModelFolder(Path(model)))
    folder = checkpoint.model.path
    source = _read_source(caller, checkpoint, from_pairing)
    others = _others(checkpoint)
    weights = sum(shard.nbytes for shard in checkpoint.shards)
    require_room(target, folder, weights + others.nbytes)
    if source.pairing == wanted:
        raise RopewalkError(
            asked=f"convert {str(folder)!r} to {to!r}",
            expected="weights in the other pairing",
            got=f"weights that are {to!r} already: nothing to do",
            do=f"use it as it is, or convert it to {next(p for p in PAIRINGS if p != to)!r}",
        )
    config, model_code = converted_config(source.text, source.config, source.pairing, wanted)
    proof = None
    with whole_folder(target, others.modes) as partial:
        for name in others.files:
            with checkpoint.model.open(name) as file:
                # As many bytes as it has now: a file that grows as fast as it is copied would have no end.
                blocks = blocks_of(file, folder / name, os.fstat(file.fileno()).st_size)
                blocks = iter([config.encode("latin-1")]) if name == CONFIG else blocks
                write_file(partial / name, blocks, _mode(file))
        done = 0
        for shard in checkpoint.shards:
            with checkpoint.model.open(shard.name) as file:
                blocks = _told(_shard_blocks(file, shard, source.plan, wanted), done, weights, tell)
                write_file(partial / shard.name, blocks, _mode(file))
            done += shard.nbytes
        if verify:
            proof = _proven(source, ModelFolder(partial), wanted, tell)
            if not proof.holds:
                raise UnprovenError(proof)
    pitfalls = dict.fromkeys(source.config.pitfalls)
    return Conversion(
        model=folder,
        out=target,
        model_type=source.config.model_type,
        converted_from=source.pairing,
        to=wanted,
        model_code=model_code,
        permuted=tuple(source.plan.parts),
        tensors=len(checkpoint.tensors),
        still=source.plan.still,
        nbytes=weights,
        left_out=others.left_out,
        notes=tuple(text for name, text in pitfalls if name in _TOLD),
        proof=proof,
    )


def _others(checkpoint: Checkpoint) -> _Others:
    """What is beside the shards. Left out are other weights, folders whose name begins with a dot, links to folders."""
    files: list[str] = []
    left: list[str] = []
    nbytes, modes = 0, {"": checkpoint.model.mode}
    folders: dict[str, int] = {}
    shards = {shard.name for shard in checkpoint.shards}
    for entry in checkpoint.model.entries():
        if entry.folder:
            if entry.link or os.path.basename(entry.name).startswith("."):
                left.append(f"{entry.name}/")
            else:
                folders[entry.name] = stat.S_IMODE((checkpoint.model.path / entry.name).stat().st_mode)
        elif entry.name in shards:
            continue
        elif is_weights(entry.name) and not (checkpoint.index and entry.name == INDEX):
            left.append(entry.name)
        else:
            with checkpoint.model.open(entry.name) as file:
                nbytes += os.fstat(file.fileno()).st_size
            files.append(entry.name)
            # Folders in which nothing is copied are not made.
            parents = [str(parent) for parent in reversed(Path(entry.name).parents) if parent != Path()]
            modes |= {parent: folders[parent] for parent in parents}
    return _Others(tuple(files), nbytes, modes, tuple(left))


def _mode(file: BinaryIO) -> int:
    return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def _require_pairing(pairing: str, caller: Caller, name: str) -> Pairing:
    require_choice(pairing, PAIRINGS, asked=caller.asked_with(name, pairing))
    return "half" if pairing == "half" else "interleaved"


def _tell_nobody(what: str, done: int, total: int) -> None:
    """The progress of a conversion whose caller does not want to know it."""


def verify_conversion(model: str | Path, converted: str | Path, *, progress: Progress | None = None) -> Proof:
    """Holds the folder `converted` to the folder `model` that it was made from.

    For every layer that rotates: attention scores of random inputs at random positions, each checkpoint under its own
    pairing, in float64, equal to 1e-12 of |q| |k|. For every tensor: the bytes that it must have.

    Args:
        model: The folder that was converted.
        converted: The folder that the conversion wrote.
        progress: Is called with what is done, how many bytes of it are done, and of how many.

    Returns:
        The proof, which holds or does not.

    Raises:
        RopewalkError: A folder that cannot be read, or two folders of which neither is a conversion of the other.

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
        # Converted back: the record is gone.
        to, pairing = before.converted_from, before.pairing
    else:
        raise RopewalkError(
            asked=f"verify_conversion({str(model)!r}, {str(converted)!r})",
            expected="a record of the conversion in one of the two configs",
            got=f"no key {KEY!r} in either",
            do="pass the folder that was converted, then the one that ropewalk convert wrote",
        )
    source = _read_source(caller, read_checkpoint(folders[0]), pairing)
    return _proven(source, folders[1], to, progress or _tell_nobody)


def _proven(source: _Source, converted: ModelFolder, to: Pairing, tell: Progress) -> Proof:
    total, done = sum(tensor.nbytes for tensor in source.checkpoint.tensors.values()), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        tell("verifying", done, total)

    return prove(source.checkpoint, read_checkpoint(converted), source.plan, (source.pairing, to), advance)


def _read_source(caller: Caller, checkpoint: Checkpoint, from_pairing: str | None) -> _Source:
    """The model of a checkpoint, and what is to be permuted in it."""
    specified = None if from_pairing is None else _require_pairing(from_pairing, caller, "from_pairing")
    text, data = read_config_file(checkpoint.model, caller)
    config = _parse(caller, data, specified)
    record = config.language.record
    # Kinds of layers differ in their frequencies, and never in their pairing.
    rotating = [spec for spec in config.layers.values() if spec is not None]
    pairing = rotating[0].pairing if rotating else config.language.family.pairing
    if specified is not None and specified != pairing:
        other = Record(specified, pairing, pairing if record is None else record.model_code)
        raise RopewalkError(
            asked=f"convert {str(checkpoint.model.path)!r} from {from_pairing!r}",
            expected=f"{pairing!r}, which {'its family has' if record is None else 'its record says'}",
            got=repr(from_pairing),
            do="leave it out; if the weights were permuted by other means, write the record into config.json:"
            f' "{KEY}": {json.dumps(other.as_dict())}',
        )
    return _Source(checkpoint, config, text, pairing, plan_of(checkpoint, config))


def _parse(caller: Caller, data: dict[str, Any], from_pairing: Pairing | None) -> Config:
    """The config of a checkpoint; `from_pairing` is for a family that is not known, and is not looked at for others."""
    refuse_without_rope(data, caller)
    keys = Keys(data, caller=caller)
    known = read_record(keys) is not None or has_known_family(keys)
    if not known and from_pairing is None:
        half, interleaved = (caller.option("from_pairing", pairing) for pairing in ("half", "interleaved"))
        raise RopewalkError(
            asked=caller.asked(f"a model of the family {shown(data.get('model_type'))}"),
            expected=f"a family whose pairing is known, or the pairing: {caller.option('from_pairing')}",
            got="neither: no config says which features form a pair",
            do=f"add {half} if its code rotates two halves (rotate_half), {interleaved} otherwise",
        )
    return parse_config(data, caller, pairing=None if known else from_pairing)


def _shard_blocks(file: BinaryIO, shard: Shard, plan: Plan, to: Pairing) -> Iterator[bytes]:
    """The bytes of a shard as they shall be: its header as it is, then each tensor."""
    yield file.read(shard.header)
    for name, tensor in shard.tensors.items():
        part = plan.parts.get(name)
        yield from tensor_blocks(file, tensor) if part is None else permuted_blocks(file, tensor, part, to)


def _told(blocks: Iterator[bytes], done: int, total: int, tell: Progress) -> Iterator[bytes]:
    """The blocks of a shard, with word of how many bytes are written when the next one is asked for."""
    for block in blocks:
        yield block
        done += len(block)
        tell("writing", done, total)
