"""Which files convert reads: regular ones inside the model's own folder or hub cache, and with no wider modes."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

import pytest

from hub.checkpoints import llama
from hub.special_files import SPECIAL
from ropewalk import RopewalkError
from ropewalk.hub import convert_checkpoint, verify_conversion
from ropewalk.hub.convert import conversion
from ropewalk.hub.convert.model_folder import ModelFolder

SECRET = b"a private word"
FILES = ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json")


@pytest.fixture
def model(tmp_path):
    folder = llama(tmp_path / "model", shards=2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def private(tmp_path):
    """A private file outside of the model's folder."""
    path = tmp_path / "private" / "key"
    path.parent.mkdir()
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(model: Path, *words: str) -> str:
    """The message of the conversion, which is refused before anything is written."""
    before = sorted(model.parent.iterdir())
    with pytest.raises(RopewalkError) as caught:
        convert_checkpoint(model, model.parent / "out", to="interleaved", verify=True)
    assert sorted(model.parent.iterdir()) == before
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


def cached(tmp_path: Path, model: Path) -> Path:
    """The model as the cache of a hub has it: a snapshot of links into a folder of blobs."""
    repository = tmp_path / "models--company--model"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.rglob("*"))):
        if path.is_dir():
            (snapshot / path.relative_to(model)).mkdir()
            continue
        shutil.copy(path, blobs / f"blob{number}")
        link = snapshot / path.relative_to(model)
        link.symlink_to(os.path.relpath(blobs / f"blob{number}", link.parent))
    return snapshot


def shared(snapshot: Path, number: int = 0) -> tuple[Path, Path]:
    """Moves a blob of weights into the store that all models of a cache share; that blob, and its file there."""
    (weights,) = snapshot.rglob("model-00001-of-*.safetensors")
    blob, digest = weights.resolve(), f"{number:02x}" + 62 * "d"
    file = snapshot.parents[2] / "blobs" / digest[:2] / digest
    file.parent.mkdir(parents=True)
    (file.parents[1] / ".huggingface-shared-blobs").write_text("1\n")
    file.with_name(f"{digest}.refs").write_text(f"{snapshot.parents[1].name}/blobs/{blob.name}\n")
    blob.rename(file)
    blob.symlink_to(os.path.relpath(file, blob.parent))
    return blob, file


def test_the_cache_of_a_hub_is_read_through_its_links(tmp_path, model):
    (model / "sub").mkdir()
    (model / "sub" / "template.jinja").write_text("hello")
    snapshot = cached(tmp_path, model)
    done = convert_checkpoint(snapshot, tmp_path / "out", to="interleaved", verify=True)
    assert done.left_out == ()
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    direct = tmp_path / "direct"
    convert_checkpoint(model, direct, to="interleaved")
    for path in direct.rglob("*"):
        if path.is_file():
            assert (tmp_path / "out" / path.relative_to(direct)).read_bytes() == path.read_bytes()
    # The folder may be reached by a link, too: what it is decides, not how it is called.
    (tmp_path / "link").symlink_to(snapshot)
    convert_checkpoint(tmp_path / "link", tmp_path / "again", to="interleaved", verify=True)


def test_a_model_in_a_folder_of_a_snapshot_is_read_through_its_links(tmp_path, model):
    (tmp_path / "pipeline").mkdir()
    model.rename(tmp_path / "pipeline" / "text_encoder")
    snapshot = cached(tmp_path, tmp_path / "pipeline")
    convert_checkpoint(snapshot / "text_encoder", tmp_path / "out", to="interleaved", verify=True)


@pytest.mark.parametrize("how", ["snapshot", "link", "folder", "absolute", "chain"])
def test_a_blob_in_the_store_that_models_share_is_read(tmp_path, model, how):
    if how == "folder":
        (tmp_path / "pipeline").mkdir()
        model.rename(tmp_path / "pipeline" / "text_encoder")
        model = tmp_path / "pipeline"
    (tmp_path / "cache").mkdir()
    snapshot = cached(tmp_path / "cache", model)
    blob, file = shared(snapshot)
    folder = snapshot / "text_encoder" if how == "folder" else snapshot
    if how == "link":
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "cache")
        folder = folder / snapshot.relative_to(tmp_path / "cache")
    elif how == "absolute":
        blob.unlink()
        blob.symlink_to(file)
    elif how == "chain":
        (snapshot / "again.safetensors.txt").symlink_to("model-00001-of-00002.safetensors")
    done = convert_checkpoint(folder, tmp_path / "out", to="interleaved", verify=True)
    assert done.left_out == ()
    convert_checkpoint(model / "text_encoder" if how == "folder" else model, tmp_path / "direct", to="interleaved")
    for path in (tmp_path / "direct").rglob("*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "how", ["no marker", "marker is a link", "store is a link", "no hex", "short", "elsewhere", "prefix is a link"]
)
def test_what_is_no_shared_store_is_outside(tmp_path, model, how):
    (tmp_path / "cache").mkdir()
    snapshot = cached(tmp_path / "cache", model)
    blob, file = shared(snapshot)
    store = file.parents[1]
    marker = store / ".huggingface-shared-blobs"
    if how == "no marker":
        marker.unlink()
    elif how == "marker is a link":
        marker.rename(store / "was")
        marker.symlink_to("was")
    elif how == "store is a link":
        store.rename(tmp_path / "store")
        store.symlink_to(tmp_path / "store")
    elif how == "prefix is a link":
        file.parent.rename(tmp_path / "00")
        (store / "00").symlink_to(tmp_path / "00")
    else:
        names = {"no hex": "00/00" + 62 * "g", "short": "00/00dd", "elsewhere": f"01/{file.name}"}
        other = store / names[how]
        other.parent.mkdir(exist_ok=True)
        file.rename(other)
        blob.unlink()
        blob.symlink_to(os.path.relpath(other, blob.parent))
    refused(snapshot, "'model-00001-of-00002.safetensors'", "a link to '../../blobs/")


@pytest.mark.parametrize("how", ["snapshot", "plain folder", "other model", "marker", "manifest", "link in the store"])
def test_a_shared_blob_is_read_through_the_blobs_of_its_model_alone(tmp_path, model, how):
    """The store has files of every model, of private ones too."""
    (tmp_path / "cache").mkdir()
    snapshot = cached(tmp_path / "cache", model)
    blob, file = shared(snapshot)
    private = file.with_name("00" + 62 * "e")
    private.write_bytes(SECRET)
    link = snapshot / "vocab.txt"
    if how == "snapshot":
        link.symlink_to(os.path.relpath(private, snapshot))
    elif how == "plain folder":
        snapshot = model
        link = model / "vocab.txt"
        link.symlink_to(private)
    elif how == "other model":
        other = tmp_path / "cache" / "models--other--model" / "blobs" / "blob"
        other.parent.mkdir(parents=True)
        other.symlink_to(os.path.relpath(private, other.parent))
        link.symlink_to(os.path.relpath(other, snapshot))
    else:
        target = {"marker": "../.huggingface-shared-blobs", "manifest": f"{file.name}.refs"}.get(how, "00" + 62 * "f")
        if how == "link in the store":
            (file.parent / target).symlink_to(private.name)
        (blob.parent / "vocab").symlink_to(os.path.relpath(file.parent / target, blob.parent))
        link.symlink_to("../../blobs/vocab")
    text = refused(snapshot, "'vocab.txt'")
    assert SECRET.decode() not in text


@pytest.mark.parametrize("system", ["Linux", "other"])
def test_a_folder_that_cannot_be_listed_can_be_passed_through(tmp_path, model, monkeypatch, system):
    """A folder of mode 0711. Not by permissions, which a superuser does not feel."""
    snapshot = cached(tmp_path, model)
    original, passing = os.open, getattr(os, "O_PATH", 0)

    def unlisted(path, flags, *args, **kwargs):
        if Path(path).name == "blobs" and not flags & passing:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", unlisted)
    if system == "Linux" and passing:
        convert_checkpoint(snapshot, tmp_path / "out", to="interleaved", verify=True)
        return
    monkeypatch.delattr(os, "O_PATH", raising=False)
    assert "replaced" not in refused(snapshot, "Permission denied")


def test_links_inside_the_folder_are_read(tmp_path, model):
    (model / "again.json").symlink_to("tokenizer.json")
    (model / "chain.json").symlink_to("again.json")
    (model / "absolute.json").symlink_to(model / "tokenizer.json")
    (model / "sub").mkdir()
    (model / "sub" / "up.json").symlink_to("../tokenizer.json")
    os.link(model / "tokenizer.json", model / "hard.json")
    (model / "folder").symlink_to("sub")
    done = convert_checkpoint(model, tmp_path / "out", to="interleaved", verify=True)
    for name in ("again.json", "chain.json", "absolute.json", "sub/up.json", "hard.json"):
        assert (tmp_path / "out" / name).read_text() == "{}"
        assert not (tmp_path / "out" / name).is_symlink()
    assert done.left_out == ("folder/",)


@pytest.mark.parametrize("name", [*FILES, "pytorch_model.bin", ".hidden", "sub/vocab.txt"])
@pytest.mark.parametrize("how", ["absolute", "relative", "chain", "folder"])
def test_a_link_that_leads_outside_is_refused_by_name(tmp_path, model, private, name, how):
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    target = private.parent if how == "folder" else private
    if how == "chain":
        (model / "step").symlink_to(private)
        path.symlink_to(model / "step")
    else:
        path.symlink_to(os.path.relpath(target, path.parent) if how == "relative" else target)
    text = refused(model, repr(str(target)))
    assert repr(name) in text or "'step'" in text
    assert SECRET.decode() not in text


def test_a_neighbour_whose_name_begins_alike_is_outside(tmp_path, model):
    (tmp_path / "model-private").mkdir()
    (tmp_path / "model-private" / "key").write_bytes(SECRET)
    (model / "key").symlink_to("../model-private/key")
    refused(model, "'key'", "model-private/key")


@pytest.mark.parametrize("target", ["../../../models--other--model/blobs/b", "../../refs/main", "../../../token"])
def test_the_rest_of_a_cache_is_outside(tmp_path, model, target):
    snapshot = cached(tmp_path, model)
    (snapshot / target).parent.mkdir(parents=True, exist_ok=True)
    (snapshot / target).write_bytes(SECRET)
    (snapshot / "vocab.txt").symlink_to(target)
    refused(snapshot, "'vocab.txt'", os.path.basename(target))


def test_blobs_that_are_a_link_or_beside_no_cache_are_outside(tmp_path, model, private):
    snapshot = cached(tmp_path, model)
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(private.parent / "blobs")
    blobs.symlink_to(private.parent / "blobs")
    refused(snapshot, "private/blobs")
    # A folder called blobs may be anyone's where the other names are not those of a cache.
    folder = tmp_path / "downloads" / "snapshots" / "model"
    shutil.copytree(model, folder)
    (tmp_path / "downloads" / "blobs").mkdir()
    (tmp_path / "downloads" / "blobs" / "key").write_bytes(SECRET)
    (folder / "key").symlink_to("../../blobs/key")
    refused(folder, "'key'", "blobs/key")


# A folder of any other name is a folder of the model's.
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in (*FILES, "vocab.txt") for kind in SPECIAL if name in FILES[:3] or "folder" not in kind],
)
def test_what_is_no_regular_file_is_refused_by_name(model, name, kind):
    (model / name).unlink(missing_ok=True)
    SPECIAL[kind](model / name)
    # A file with a hole is a file; as weights, config and index it is refused, and beside them for want of room.
    refused(model, "free disk space" if "huge" in kind and name not in FILES[:3] else name)


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, model, monkeypatch):
    """Not by permissions, which a superuser does not feel."""
    (model / "sub").mkdir()
    original = os.scandir

    def unlisted(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", unlisted)
    refused(model, "'sub'", "Permission denied")


def test_folders_in_folders_without_end(model):
    place = model
    for _ in range(40):
        place = place / "a"
        place.mkdir()
    refused(model, "levels of folders")


@pytest.mark.parametrize("name", ["new\nline", "esc\x1b[31mape", os.fsdecode(b"\xff\xfe")])
def test_names_are_shown_without_their_control_characters(tmp_path, model, private, name):
    (model / name).symlink_to(private)
    text = refused(model, repr(name))
    assert len(text.splitlines()) == 4
    assert "\x1b" not in text


def test_a_file_that_is_exchanged_for_a_link_is_never_read(tmp_path, model, private, monkeypatch):
    """At every opening that the conversion makes, the file is exchanged between the look at it and the opening."""
    original, calls = os.open, []

    def exchanged(path, flags, *args, **kwargs):
        if isinstance(path, str) and path.startswith(str(model)) and not flags & os.O_DIRECTORY:
            calls.append(path)
            if len(calls) == number[0]:
                os.rename(path, path + ".was")
                os.symlink(private, path)
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", exchanged)
    number = [0]
    convert_checkpoint(model, tmp_path / "out", to="interleaved", verify=True)
    total = len(calls)
    assert total >= 2 * len(FILES)
    shutil.rmtree(tmp_path / "out")
    for rotate in range(1, total + 1):
        calls.clear()
        number[0] = rotate
        with pytest.raises(RopewalkError, match="replaced") as caught:
            convert_checkpoint(model, tmp_path / "out", to="interleaved", verify=True)
        assert repr(os.path.basename(calls[-1])) in str(caught.value)
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.ropewalk-partial").exists()
        os.rename(calls[-1] + ".was", calls[-1])


def test_a_folder_that_is_exchanged_for_a_link_is_never_read(tmp_path, model, private):
    (model / "sub").mkdir()
    (model / "sub" / "key").write_text("open")
    folder = ModelFolder(model)
    with folder.open("sub/key") as file:
        assert file.read() == b"open"
    (model / "sub").rename(model / "was")
    (model / "sub").symlink_to(private.parent)
    with pytest.raises(RopewalkError, match="'sub/key'"):
        folder.open("sub/key")
    # The model's folder itself.
    other = shutil.copytree(private.parent, tmp_path / "other")
    model.rename(tmp_path / "gone")
    other.rename(model)
    with pytest.raises(RopewalkError, match="replaced"):
        folder.open("key")


def test_a_copied_file_that_grows_without_end(tmp_path, model, monkeypatch):
    """As many bytes are copied as it had when it was opened."""
    original = conversion.write_file

    def growing(path, blocks, mode):
        def more():
            for block in blocks:
                with (model / "tokenizer.json").open("ab") as file:
                    file.write(b" " * (2 << 20))
                yield block

        original(path, more() if path.name == "tokenizer.json" else blocks, mode)

    monkeypatch.setattr(conversion, "write_file", growing)
    (model / "tokenizer.json").write_bytes(b"x" * (8 << 20))
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    assert (tmp_path / "out" / "tokenizer.json").stat().st_size == 8 << 20


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("links", [False, True], ids=["files", "links"])
def test_modes_are_never_wider(tmp_path, model, mask, links):
    (model / "sub").mkdir()
    (model / "sub" / "secret.txt").write_text("private")
    modes = {
        "config.json": 0o600,
        "model-00001-of-00002.safetensors": 0o640,
        "model-00002-of-00002.safetensors": 0o400,
        "model.safetensors.index.json": 0o604,
        "tokenizer.json": 0o755,
        "sub/secret.txt": 0o4660,
    }
    folder = cached(tmp_path, model) if links else model
    for name, mode in modes.items():
        (folder / name).resolve().chmod(mode)
    folder.chmod(0o750)
    (folder / "sub").chmod(0o511)
    seen = []

    def progress(what, done, total):
        place = next(path for path in tmp_path.iterdir() if path.name.startswith("out"))
        seen.append(mode_of(place) & ~0o750)
        for path in place.rglob("*"):
            if path.is_file():
                assert mode_of(path) & ~modes[str(path.relative_to(place))] == 0

    with umask(mask):
        convert_checkpoint(folder, tmp_path / "out", to="interleaved", verify=True, progress=progress)
    assert seen
    assert not any(seen)
    for name, mode in modes.items():
        assert mode_of(tmp_path / "out" / name) == mode & 0o777 & ~mask
    assert mode_of(tmp_path / "out") == 0o750 & ~mask
    assert mode_of(tmp_path / "out" / "sub") == 0o511 & ~mask


def test_what_a_killed_process_left_is_removed_whatever_its_modes_are(tmp_path, model):
    left = tmp_path / "out.ropewalk-partial" / "sub"
    left.mkdir(parents=True)
    (left / "file").write_text("old")
    left.chmod(0o500)
    left.parent.chmod(0o500)
    model.chmod(0o700)
    convert_checkpoint(model, tmp_path / "out", to="interleaved")
    assert not left.parent.exists()
    assert mode_of(tmp_path / "out") == 0o700
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in model.iterdir())


def test_a_name_that_the_output_has_already_is_not_written_over(tmp_path, model, monkeypatch):
    """As where two names differ in case alone, and the output's file system does not tell them apart."""
    original = conversion.write_file
    monkeypatch.setattr(
        conversion, "write_file", lambda path, *rest: original(path.with_name(path.name.lower()), *rest)
    )
    (model / "TOKENIZER.json").write_text("[]")
    refused(model, "File exists", "tokenizer.json")


def test_a_proof_reads_no_file_outside_either(tmp_path, model, private):
    out = tmp_path / "out"
    convert_checkpoint(model, out, to="interleaved")
    for folder in (out, model):
        for name in FILES[:3]:
            (folder / name).rename(tmp_path / "was")
            (folder / name).symlink_to(tmp_path / "was")
            with pytest.raises(RopewalkError, match=f"'{name}'"):
                verify_conversion(model, out)
            (folder / name).unlink()
            os.mkfifo(folder / name)
            with pytest.raises(RopewalkError, match=name):
                verify_conversion(model, out)
            (folder / name).unlink()
            (tmp_path / "was").rename(folder / name)
    assert verify_conversion(model, out).holds
