"""Checkpoints from one pairing to the other: q and k permuted, all else as it was, written whole or not at all."""

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError, require_choice
from ropewalk.hub.configs.language import language_model
from ropewalk.hub.configs.model import Model, read_model
from ropewalk.hub.configs.pitfalls import RopeConfigWarning
from ropewalk.hub.configs.read import read_config
from ropewalk.hub.configs.record import KEY, Record, read_record
from ropewalk.hub.convert.checkpoint import INDEX, Checkpoint, Shard, read_checkpoint
from ropewalk.hub.convert.folders import other_files, require_room, whole_folder, write_file
from ropewalk.hub.convert.permutation import Plan, plan_of
from ropewalk.hub.convert.proof import Proof, prove
from ropewalk.hub.convert.streams import permuted_blocks, tensor_blocks
from ropewalk.hub.families.table import Family
from ropewalk.spec.rope import PAIRINGS

__all__ = ["Conversion", "UnprovenError", "convert_checkpoint", "verify_conversion"]

# What is done, how many bytes of it are done, and of how many.
Progress = Callable[[str, int, int], None]
# Warnings about a config that matter to which rows are permuted.
_TOLD = ("unknown-family", "partial-truncated")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did. `model_code` is the pairing in which the family's own code, such as that of transformers,
    rotates the output: where it is not `to`, the output is for other stacks."""

    model: Path
    out: Path
    model_type: str | None
    converted_from: str
    to: str
    model_code: str
    permuted: tuple[str, ...]
    tensors: int
    still: tuple[str, ...]
    nbytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    proof: Proof | None


class UnprovenError(Exception):
    """A conversion whose output is not what it must be, with the proof that says where. Nothing of it is kept."""

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        wrong = [*proof.differing, *(layer.layer for layer in proof.layers if not layer.equal)]
        super().__init__(f"{len(wrong)} tensors or layers are not what they must be: {', '.join(wrong[:5])}")


@dataclass(frozen=True)
class _Source:
    """A model that was read and planned, with nothing written yet. `data` is its config without the record."""

    checkpoint: Checkpoint
    data: dict[str, Any]
    record: Record | None
    part: dict[str, Any]
    family: Family
    model: Model
    pairing: str
    plan: Plan


def convert_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    to: str,
    from_pairing: str | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Writes the checkpoint in the folder `model` to the folder `out` in the pairing `to`: "interleaved" or "half".

    Within the features that turn, pair i of d/2 is (2i, 2i + 1) or (i, i + d/2). The rows of the q and k projections,
    their biases and the weights of their norms are put in that order, head by head; scores q·k do not see an order that
    both share (RoFormer, 2104.09864, eq. 15). Bytes are moved and nothing is computed, so that a conversion and its
    inverse give the same files. All else is copied as it is.

    The pairing that the weights have is that of the family, or of the record that an earlier conversion left in
    config.json; where neither says it, `from_pairing` must. With `verify` the output is proven before it gets its name
    (`verify_conversion`); UnprovenError is raised where that fails, and nothing is left.

    Only safetensors are read, a block at a time, and quantised weights are refused. Whatever happens, `out` is there
    whole or not at all, and the source is never written.
    """
    require_choice(to, PAIRINGS, asked="convert_checkpoint(to=...)")
    folder, target = Path(model), Path(out)
    tell = progress or (lambda what, done, total: None)
    checkpoint = read_checkpoint(folder)
    copied, left = other_files(checkpoint)
    weights = sum(shard.path.stat().st_size for shard in checkpoint.shards)
    require_room(target, folder, weights + sum((folder / name).stat().st_size for name in copied))
    source = _read_source(checkpoint, from_pairing)
    if source.pairing == to:
        raise RopewalkError(
            asked=f"convert {str(folder)!r} to {to!r}",
            expected="weights in the other pairing",
            got=f"weights that are {to!r} already: nothing to do",
            do=f"use it as it is, or convert it to {next(p for p in PAIRINGS if p != to)!r}",
        )
    config, model_code = _new_config(source, to)
    if checkpoint.index:
        copied = [INDEX, *copied]
        left = [name for name in left if name != INDEX]
    proof = None
    with whole_folder(target) as partial:
        for name in copied:
            if name != "config.json":
                write_file(partial / name, _file_blocks(folder / name))
        write_file(partial / "config.json", [config.encode()])
        done = 0
        for shard in checkpoint.shards:
            blocks = _shard_blocks(shard, source.plan, to)
            done = _write_shard(partial / shard.path.name, blocks, done, weights, tell)
        if verify:
            proof = _proven(source, partial, to, tell)
            if not proof.holds:
                raise UnprovenError(proof)
    return Conversion(
        model=folder,
        out=target,
        model_type=source.model.model_type,
        converted_from=source.pairing,
        to=to,
        model_code=model_code,
        permuted=tuple(source.plan.parts),
        tensors=len(checkpoint.tensors),
        still=source.plan.still,
        nbytes=weights,
        left_out=tuple(left),
        notes=tuple(text for name, text in source.model.warnings if name in _TOLD),
        proof=proof,
    )


def verify_conversion(model: str | Path, converted: str | Path, *, progress: Progress | None = None) -> Proof:
    """Holds the folder `converted` to the folder `model` that it was made from.

    For every layer that rotates: attention scores of random inputs at random positions, each checkpoint under its own
    pairing, in float64, equal to 1e-12 of |q| |k|. For every tensor: the bytes that it must have.
    """
    record = read_record(read_config(Path(converted) / "config.json"))
    if record is None:
        own = read_record(read_config(Path(model) / "config.json"))
        # Converted back: the record is gone.
        to, before = (None, None) if own is None else (own.converted_from, own.pairing)
    else:
        to, before = record.pairing, record.converted_from
    if to is None:
        raise RopewalkError(
            asked=f"verify_conversion({str(model)!r}, {str(converted)!r})",
            expected="a record of the conversion in one of the two configs",
            got=f"no key {KEY!r} in either",
            do="pass the folder that was converted, then the one that ropewalk convert wrote",
        )
    source = _read_source(read_checkpoint(Path(model)), before)
    return _proven(source, Path(converted), to, progress or (lambda what, done, total: None))


def _proven(source: _Source, converted: Path, to: str, tell: Progress) -> Proof:
    total, done = sum(tensor.nbytes for tensor in source.checkpoint.tensors.values()), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        tell("verifying", done, total)

    return prove(source.checkpoint, read_checkpoint(converted), source.plan, (source.pairing, to), advance)


def _read_source(checkpoint: Checkpoint, from_pairing: str | None) -> _Source:
    """The model of a checkpoint, and what is to be permuted in it."""
    if from_pairing is not None:
        require_choice(from_pairing, PAIRINGS, asked="convert_checkpoint(from_pairing=...)")
    config = read_config(checkpoint.folder / "config.json")
    record = read_record(config)
    model, said = _read_known(config, from_pairing)
    data = {key: value for key, value in config.items() if key != KEY}
    with warnings.catch_warnings():
        # `read_model` has kept them.
        warnings.simplefilter("ignore", RopeConfigWarning)
        part, family = language_model(data, said if record is None else record.model_code)
    found = {spec.pairing for _, spec in model.layers if spec is not None}
    # Kinds of layers differ in their frequencies, and never in their pairing.
    pairing = next(iter(found), family.pairing)
    if from_pairing is not None and from_pairing != pairing:
        other = Record(from_pairing, pairing, pairing if record is None else record.model_code)
        raise RopewalkError(
            asked=f"convert {str(checkpoint.folder)!r} from {from_pairing!r}",
            expected=f"{pairing!r}, which {'its family has' if record is None else 'its record says'}",
            got=repr(from_pairing),
            do="leave it out; if the weights were permuted by other means, write the record into config.json:"
            f' "{KEY}": {json.dumps(other.as_dict())}',
        )
    plan = plan_of(checkpoint, data, part, family, model.layers)
    return _Source(checkpoint, data, record, part, family, model, pairing, plan)


def _read_known(data: dict[str, Any], from_pairing: str | None) -> tuple[Model, str | None]:
    """The model of a config, and the pairing that had to be said for it: None where the family is known."""
    try:
        return read_model(data), None
    except RopewalkError:
        if from_pairing is not None:
            return read_model(data, pairing=from_pairing), from_pairing
        try:
            read_model(data, pairing="half")
        except RopewalkError:
            pass
        else:
            raise RopewalkError(
                asked=f"convert a model of the family {data.get('model_type')!r}",
                expected="a family whose pairing is known, or the pairing: --from (from_pairing=)",
                got="neither: no config says which features form a pair",
                do="add --from half if its code rotates two halves (rotate_half), --from interleaved otherwise",
            ) from None
        raise


def _new_config(source: _Source, to: str) -> tuple[str, str]:
    """The text of the output's config.json, and the pairing in which the model's own code will rotate it."""
    record, key, config = source.record, source.family.interleave_key, dict(source.data)
    if key is not None and _holds(source.data, source.part):
        # These families are told by a flag how to pair: their own code follows the weights.
        source.part[key] = to == "interleaved"
        config |= source.data
        model_code = to
    else:
        model_code = source.pairing if record is None else record.model_code
    if record is None or record.converted_from != to:
        config[KEY] = Record(to, source.pairing, model_code).as_dict()
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n", model_code


def _holds(data: Any, part: dict[str, Any]) -> bool:
    """Whether `part` itself, and no copy of it, stands somewhere in `data`."""
    return data is part or (isinstance(data, dict) and any(_holds(value, part) for value in data.values()))


def _shard_blocks(shard: Shard, plan: Plan, to: str) -> Iterator[bytes]:
    """The bytes of a shard as they shall be: its header as it is, then each tensor."""
    with shard.path.open("rb") as file:
        yield file.read(shard.header)
        for name, tensor in shard.tensors.items():
            part = plan.parts.get(name)
            yield from tensor_blocks(file, tensor) if part is None else permuted_blocks(file, tensor, part, to)


def _file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _write_shard(path: Path, blocks: Iterator[bytes], done: int, total: int, tell: Progress) -> int:
    """Writes a shard, telling how far it is; how many bytes are done then."""

    def told() -> Iterator[bytes]:
        nonlocal done
        for block in blocks:
            yield block
            done += len(block)
            tell("writing", done, total)

    write_file(path, told())
    return done
