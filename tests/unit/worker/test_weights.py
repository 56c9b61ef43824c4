"""Loading checkpoints: what fits is copied, and what does not is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagoda.worker.errors import ModelError
from pagoda.worker.weights import Shard, checkpoint_files, checkpoint_size, load_weights, weights_digest

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
TENSORS = {
    EMBED: torch.arange(12.0).reshape(4, 3),
    NORM: torch.tensor([1.0, 2.0, 3.0]),
    HEAD: -torch.arange(12.0).reshape(4, 3),
}
INDEX = "model.safetensors.index.json"


def ignore_progress(what: str, done: int, total: int) -> None:
    """Whoever loads here does not wait."""


def views(*names: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Where tensors go, full of NaN."""
    return {name: torch.full_like(TENSORS[name], float("nan"), dtype=dtype) for name in names}


def write_shards(folder: Path, *shards: list[str]) -> None:
    """A checkpoint of several files, with its index."""
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: TENSORS[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def load(folder: Path, targets: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = {name: Shard.whole(target) for name, target in targets.items()}
    load_weights(shards, checkpoint_files(folder), progress=ignore_progress)
    return targets


def assert_loaded(loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in loaded.items():
        assert torch.equal(tensor.float(), TENSORS[name])


def test_one_file(tmp_path: Path) -> None:
    """Every tensor arrives, and progress counts them up to all of them."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    targets, reports = views(EMBED, NORM, HEAD), []
    shards = {name: Shard.whole(target) for name, target in targets.items()}
    load_weights(shards, checkpoint_files(tmp_path), progress=lambda *report: reports.append(report))
    assert_loaded(targets)
    assert reports == [("loading weights", done, 3) for done in (1, 2, 3)]


def test_shards_by_their_index(tmp_path: Path) -> None:
    """The index decides: a stray `model.safetensors` beside the shards is not read."""
    write_shards(tmp_path, [EMBED], [NORM, HEAD])
    (tmp_path / "model.safetensors").write_bytes(b"stray")
    assert [path.name for path in checkpoint_files(tmp_path)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert_loaded(load(tmp_path, views(EMBED, NORM, HEAD)))


def test_weights_take_the_type_and_place_of_their_view(tmp_path: Path) -> None:
    """A float32 checkpoint fills bfloat16 parameters, also where one is a slice of a fused matrix."""
    save_file({NORM: TENSORS[NORM], EMBED: TENSORS[EMBED]}, tmp_path / "model.safetensors")
    fused = torch.full((8, 3), float("nan"), dtype=torch.bfloat16)
    load(tmp_path, {EMBED: fused[2:6]} | views(NORM))
    assert torch.equal(fused[2:6].float(), TENSORS[EMBED])
    assert fused[:2].isnan().all()
    assert fused[6:].isnan().all()


@pytest.mark.parametrize(("dim", "start", "size"), [(0, 0, 2), (0, 2, 2), (0, 3, 1), (1, 0, 1), (1, 1, 2), (0, 4, 0)])
def test_of_a_shard_only_its_part_is_read(tmp_path: Path, dim: int, start: int, size: int) -> None:
    """Rows or columns; also none, where the vocabulary does not reach the last rank."""
    save_file({EMBED: TENSORS[EMBED]}, tmp_path / "model.safetensors")
    whole = TENSORS[EMBED]
    target = torch.full_like(whole.narrow(dim, start, size), float("nan"))
    shard = Shard(target, tuple(whole.shape), dim=dim, start=start)
    load_weights({EMBED: shard}, checkpoint_files(tmp_path), progress=ignore_progress)
    assert torch.equal(target, whole.narrow(dim, start, size))


def test_a_shard_of_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Though the part would be there."""
    save_file({EMBED: TENSORS[EMBED]}, tmp_path / "model.safetensors")
    shard = Shard(torch.empty(2, 3), (5, 3))
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has shape \[4, 3\], config\.json .* \[5, 3\]"):
        load_weights({EMBED: shard}, checkpoint_files(tmp_path), progress=ignore_progress)


def test_tensors_of_other_parts_are_ignored_by_their_prefix(tmp_path: Path) -> None:
    """Scenario: a model that reads images too, of which only the language model is served."""
    save_file(TENSORS | {"vision_tower.a": torch.ones(2)}, tmp_path / "model.safetensors")
    shards = {name: Shard.whole(torch.empty_like(tensor)) for name, tensor in TENSORS.items()}
    files = checkpoint_files(tmp_path)
    load_weights(shards, files, ignored_prefixes=("vision_tower.",), progress=ignore_progress)
    with pytest.raises(ModelError, match=r"vision_tower\.a has no place"):
        load_weights(shards, files, progress=ignore_progress)


def test_tied_head_is_skipped(tmp_path: Path) -> None:
    """Scenario: a model with a tied head, saved with a copy of it: the embedding serves, the copy is no error."""
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_loaded(load(tmp_path, views(EMBED, NORM)))


def test_missing_head_of_a_model_that_is_not_tied(tmp_path: Path) -> None:
    save_file({EMBED: TENSORS[EMBED], NORM: TENSORS[NORM]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"/model\.safetensors: tensor lm_head\.weight, .*, is missing$"):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_inverse_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}
    save_file(TENSORS | old, tmp_path / "model.safetensors")
    assert_loaded(load(tmp_path, views(EMBED, NORM, HEAD)))


def test_no_checkpoint(tmp_path: Path) -> None:
    """Also of a folder with weights in another format, which is worth a hint."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"model\.safetensors missing; Pagoda loads safetensors"):
        checkpoint_files(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, [EMBED], [NORM], [HEAD])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r": model-00002-of-00003\.safetensors missing, with tensor 'model\.norm"):
        checkpoint_files(tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r": model-00002-of-00003\.safetensors and 1 more missing"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", ".", "", "a\nb", "a\0b", "a" * 5000], ids=ascii
)
def test_index_that_names_what_is_no_file_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {EMBED: name}}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json is not a shard index: '.*' is not a file's name$") as caught:
        checkpoint_files(tmp_path)
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 250


def test_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r": model\.safetensors is a folder, not a file"):
        checkpoint_files(tmp_path)
    (tmp_path / INDEX).mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not a shard index: IsADirectoryError"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "null",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
    ],
    ids=lambda text: text[:20],
)
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not a shard index"):
        checkpoint_files(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """In whichever of the files it is sought."""
    write_shards(tmp_path, [EMBED], [HEAD])
    with pytest.raises(ModelError, match=r"/model\.safetensors\.index\.json: tensor model\.norm\.weight.* is missing$"):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_tensor_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    """Scenario: one file of a checkpoint was replaced by another one's of the same name."""
    write_shards(tmp_path, [EMBED], [NORM, HEAD])
    save_file({"rotary_emb.inv_freq": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    message = r"model-00002-of-00002\.safetensors: tensor lm_head\.weight is not there, .*, nor are 1 more$"
    with pytest.raises(ModelError, match=message):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_tensor_of_two_files_is_named(tmp_path: Path) -> None:
    """Which of them is meant, nobody knows."""
    write_shards(tmp_path, [EMBED, NORM], [NORM, HEAD])
    message = (
        r"model-00002-of-00002\.safetensors: tensor model\.norm\.weight is in model-00001-of-00002\.safetensors too"
    )
    with pytest.raises(ModelError, match=message):
        load(tmp_path, views(EMBED, NORM, HEAD))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_tensor_of_a_type_that_means_something_else_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    """Scenario: a quantised checkpoint whose config does not say so; its numbers, read as they are, are nonsense."""
    save_file(TENSORS | {NORM: torch.ones(3).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"/model\.safetensors: tensor model\.norm\.weight has dtype [IUBF]\w+, supported: "
    ):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_size_of_a_checkpoint(tmp_path: Path) -> None:
    """Of all its files, whatever types are in them."""
    write_shards(tmp_path, [EMBED], [NORM])
    assert checkpoint_size(checkpoint_files(tmp_path)) == (15, 60)
    others = {"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(2).to(torch.float8_e4m3fn), "c": torch.ones(())}
    save_file(others, tmp_path / "other.safetensors")
    assert checkpoint_size([tmp_path / "other.safetensors"]) == (6, 3 + 2 + 4)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    """Scenario: a checkpoint with a part that this architecture lacks would give other tokens if loaded without it."""
    save_file(TENSORS | {"model.layers.0.self_attn.q_norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor model\.layers\.0\.self_attn\.q_norm\.weight has"):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    """Also a shape that would broadcast into its place."""
    save_file(TENSORS | {EMBED: torch.ones(1, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight has shape \[1, 3\], config\.json .* \[4, 3\]"):
        load(tmp_path, views(EMBED, NORM, HEAD))


@pytest.mark.parametrize("num_bytes", [0, 4, 50, -1])
def test_truncated_file_is_named(tmp_path: Path, num_bytes: int) -> None:
    """Scenario: a copy of the folder was interrupted; cut to nothing, in the size, in the header, in the data."""
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_tensor_in_which_a_file_ends_is_named(tmp_path: Path) -> None:
    """And how much is missing. The tensors lie in the order head, embedding, norm."""
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    content = path.read_bytes()
    path.write_bytes(content[:-13])
    said = rf"it has {len(content) - 13} of {len(content)} bytes; tensor model\.embed_tokens\.weight is the first"
    with pytest.raises(ModelError, match=said):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_pointer_of_git_lfs_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GARBAGE["LFS pointer"])
    with pytest.raises(ModelError, match="cannot be read: it is a Git LFS pointer; `git lfs pull` brings"):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_name_of_a_tensor_that_would_spoil_the_line_is_quoted(tmp_path: Path) -> None:
    save_file(TENSORS | {"a\nb": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'a\\nb' has no place"):
        load(tmp_path, views(EMBED, NORM, HEAD))


GARBAGE = {
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "no tensors": (2).to_bytes(8, "little") + b"[]",
    "tensors without places": (8).to_bytes(8, "little") + b'{"a":{}}',
    "not JSON": (8).to_bytes(8, "little") + b"{{{{{{{{",
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Scenario: the repository was cloned without its large files, or the disk lies."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load(tmp_path, views(EMBED, NORM, HEAD))


def test_digest_depends_on_config_and_contents(tmp_path: Path) -> None:
    """Equal digests share cached blocks across a cluster, so anything that changes the KV must change them."""

    def digest(config: str, *shards: list[str], flip: bool = False) -> bytes:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(config, encoding="utf-8")
        write_shards(folder, *shards)
        files = checkpoint_files(folder)
        if flip:
            content = bytearray(files[-1].read_bytes())
            content[-1] ^= 1
            files[-1].write_bytes(content)
        result = weights_digest(folder, files)
        folder.rename(tmp_path / f"model-{len(list(tmp_path.iterdir()))}")
        return result

    original = digest("{}", [EMBED, NORM], [HEAD])
    assert len(original) == 32
    assert digest("{}", [EMBED, NORM], [HEAD]) == original
    others = [
        digest('{"rope_theta": 1}', [EMBED, NORM], [HEAD]),
        digest("{}", [EMBED], [NORM, HEAD]),
        digest("{}", [EMBED, NORM], [HEAD], flip=True),
    ]
    assert len({original, *others}) == 4
