"""Data: every format gives the same points; what is not data is refused in one sentence; nothing that is read runs."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import types
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from PIL import Image
from pyarrow import csv, feather, ipc, parquet

from nwflow.data import (
    MissingDataError,
    PatchWarning,
    ScaleWarning,
    TransformersEncoder,
    check_same_scale,
    check_widths,
    list_images,
    load_encoder,
    load_support,
    read_metadata,
    save_points,
    unit_norm,
)
from nwflow.support import Support

VALUES = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
LABELS = np.array([0, 1, 2] * 4)


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.write_text, (self.marker, "ran"))


def write_idx(path: Path, array: np.ndarray, code: int) -> Path:
    data = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def table(vectors: bool = True) -> pa.Table:
    if vectors:
        column = pa.FixedSizeListArray.from_arrays(pa.array(VALUES.ravel()), 3)
        return pa.table({"features": column, "kind": LABELS, "name": [f"n{i}" for i in range(12)]})
    return pa.table({**{f"x{i}": VALUES[:, i] for i in range(3)}, "kind": LABELS})


def write(path: Path) -> dict:
    """The same points and labels in the format of ``path``; returns what load_support has to be told."""
    kind = path.suffix
    tensors = {"points": torch.from_numpy(VALUES), "kind": torch.from_numpy(LABELS)}
    if kind == ".npy":
        np.save(path, VALUES)
        np.save(path.with_name("labels.npy"), LABELS)
        return {"label": str(path.with_name("labels.npy"))}
    if kind == ".npz":
        np.savez(path, points=VALUES, kind=LABELS)
    elif kind == ".safetensors":
        safetensors.torch.save_file(tensors, path)
    elif kind in (".pt", ".pth"):
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == ".pt")
    elif kind == ".parquet":
        parquet.write_table(table(), path)
    elif kind == ".feather":
        feather.write_feather(table(), path)
    elif kind == ".arrow":
        with ipc.new_stream(path, table().schema) as writer:
            writer.write_table(table())
    else:
        csv.write_csv(table(False), path, csv.WriteOptions(delimiter="," if kind == ".csv" else "\t"))
    return {"label": "kind"}


FORMATS = [".npy", ".npz", ".safetensors", ".pt", ".pth", ".parquet", ".feather", ".arrow", ".csv", ".tsv"]


# -- all formats alike ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_support(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    told = write(path)
    support = load_support(path, **told)
    np.testing.assert_allclose(support.points.numpy(), VALUES, rtol=0 if suffix[1] not in "ct" else 1e-6)
    assert support.labels.tolist() == LABELS.tolist()
    assert support.label_names == (0, 1, 2)
    part = load_support(str(path), limit=5, **told)
    assert torch.equal(part.points, support.points[:5])
    assert part.labels.tolist() == LABELS[:5].tolist()


@pytest.mark.parametrize("suffix", FORMATS)
def test_loading_never_writes_and_points_can_be_changed_in_place(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    told = write(path)
    before = path.read_bytes()
    support = load_support(path, **told)
    support.points.div_(support.points.norm(dim=1, keepdim=True))
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", [*FORMATS, ".idx"])
def test_empty_file_is_said_to_be_empty(tmp_path, suffix):
    (tmp_path / f"f{suffix}").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"f\{suffix}: file is empty"):
        load_support(tmp_path / f"f{suffix}")


@pytest.mark.parametrize("suffix", [*FORMATS, ".idx"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "is an HTML page, not"),
        (b"\n <html>404</html>", "is an HTML page, not"),
        (b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 1\n", "is a Git LFS pointer .*, not"),
        (b"/annex/objects/SHA256E-s1--0.npy\n", "is a git-annex pointer .*, not"),
    ],
)
def test_stand_ins_for_data_are_recognised(tmp_path, suffix, content, message):
    (tmp_path / f"f{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_support(tmp_path / f"f{suffix}")


def test_dangling_annex_link_is_recognised(tmp_path):
    (tmp_path / "f.npy").symlink_to(".git/annex/objects/x/y/SHA256E-s1--0.npy")
    with pytest.raises(FileNotFoundError, match="git annex get"):
        load_support(tmp_path / "f.npy")


@pytest.mark.parametrize("suffix", [s for s in FORMATS if s not in (".csv", ".tsv", ".arrow")])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.97])
def test_truncated_file_is_said_to_be_truncated(tmp_path, suffix, keep):
    path = tmp_path / f"data{suffix}"
    told = write(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match="file is truncated"):
        load_support(path, **told)


@pytest.mark.parametrize("suffix", FORMATS)
def test_random_bytes_are_one_sentence(tmp_path, suffix):
    path = tmp_path / f"f{suffix}"
    path.write_bytes(b"\x07" + np.random.default_rng(0).bytes(4000))
    with pytest.raises(ValueError, match=rf"f\{suffix}: ") as caught:
        load_support(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt", ".parquet", ".csv"])
def test_zero_rows_are_no_references(tmp_path, suffix):
    path = tmp_path / f"f{suffix}"
    empty = np.zeros((0, 4), dtype=np.float32)
    if suffix == ".npy":
        np.save(path, empty)
    elif suffix == ".npz":
        np.savez(path, a=empty)
    elif suffix == ".safetensors":
        safetensors.torch.save_file({"a": torch.zeros(0, 4)}, path)
    elif suffix == ".pt":
        torch.save(torch.zeros(0, 4), path)
    else:
        rows = pa.table({"x": pa.array([], pa.float32())})
        parquet.write_table(rows, path) if suffix == ".parquet" else csv.write_csv(rows, path)
    with pytest.raises(ValueError, match=rf"f\{suffix}: .*no references"):
        load_support(path)


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet", ".csv"])
def test_bad_rows_are_named_with_the_file_or_dropped(tmp_path, suffix):
    path = save_points(tmp_path / f"f{suffix}", torch.tensor([[-1.0], [1.0], [float("nan")]]))
    with pytest.raises(ValueError, match=rf"f\{suffix}: points: 1 bad row .*index 2"):
        load_support(path)
    support = load_support(path, drop_nonfinite=True)
    assert (support.n_used, support.n_dropped) == (2, 1)


# -- pickles ----------------------------------------------------------------------------------------------------------


def test_object_array_is_refused_with_its_shape(tmp_path):
    ragged = np.empty(2, dtype=object)
    ragged[:] = [[1.0], [1.0, 2.0]]
    np.save(tmp_path / "f.npy", ragged, allow_pickle=True)
    np.savez(tmp_path / "f.npz", a=ragged)
    for name in ("f.npy", "f.npz"):
        with pytest.raises(ValueError, match=r"object array of shape \(2,\) .*pickle"):
            load_support(tmp_path / name)


def test_no_payload_ever_runs(tmp_path):
    marker = tmp_path / "marker"
    evil = np.empty(1, dtype=object)
    evil[0] = Payload(marker)
    np.save(tmp_path / "a.npy", evil, allow_pickle=True)
    np.savez(tmp_path / "a.npz", evil)
    torch.save({"points": torch.ones(2, 2), "more": Payload(marker)}, tmp_path / "a.pt")
    torch.save(Payload(marker), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for name in ("b.npy", "b.npz", "b.pt", "b.safetensors", "b.parquet", "b.csv", "b.arrow", "b.idx"):
        (tmp_path / name).write_bytes(pickle.dumps(Payload(marker)))
    files = [p for p in tmp_path.iterdir() if p.name != "marker"]
    assert len(files) == 12
    for path in files:
        with pytest.raises(ValueError, match=path.name) as caught:
            load_support(path)
        assert path.suffix in (".csv",) or "pickle" in str(caught.value) or "can run code" in str(caught.value)
    assert not marker.exists()


# -- arrays -----------------------------------------------------------------------------------------------------------


def test_several_arrays_ask_for_a_key(tmp_path):
    np.savez(tmp_path / "f.npz", a=VALUES, b=VALUES * 2)
    safetensors.torch.save_file({"a": torch.ones(1, 1), "b": torch.ones(2, 1)}, tmp_path / "f.safetensors")
    torch.save({"a": torch.ones(1, 1), "b": torch.ones(2, 1)}, tmp_path / "f.pt")
    for name in ("f.npz", "f.safetensors", "f.pt"):
        with pytest.raises(ValueError, match="several arrays, choose one with key=: a, b"):
            load_support(tmp_path / name)
        assert load_support(tmp_path / name, key="b").m > 1
        with pytest.raises(ValueError, match="no 'c'; the file holds a, b"):
            load_support(tmp_path / name, key="c")


def test_big_endian_file_loads_natively(tmp_path):
    np.save(tmp_path / "f.npy", np.array([[1, 2], [3, 4]], dtype=">f4"))
    support = load_support(tmp_path / "f.npy")
    assert support.dtype == torch.float32
    assert support.points.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_fortran_order_keeps_its_values(tmp_path):
    np.save(tmp_path / "f.npy", np.asfortranarray(VALUES))
    assert np.array_equal(load_support(tmp_path / "f.npy").points.numpy(), VALUES)


def test_npy_is_mapped_not_read(tmp_path):
    np.save(tmp_path / "f.npy", VALUES)
    points = load_support(tmp_path / "f.npy").points
    np.lib.format.open_memmap(tmp_path / "f.npy", mode="r+")[0, 0] = 42.0
    assert points[0, 0] == 42.0  # what the file says now: nothing had been copied


def test_integer_file_is_promoted_with_a_note(tmp_path):
    np.save(tmp_path / "f.npy", np.array([0, 255], dtype=np.uint8))
    support = load_support(tmp_path / "f.npy")
    assert support.points.tolist() == [0.0, 255.0]
    assert "uint8 promoted to float32" in support.notes[0]


@pytest.mark.parametrize("dtype", [np.dtype([("a", "f4"), ("b", "f4")]), np.dtype("c8"), np.dtype("U3")])
def test_arrays_that_are_no_numbers_are_refused(tmp_path, dtype):
    np.save(tmp_path / "f.npy", np.zeros(3, dtype=dtype))
    with pytest.raises((ValueError, TypeError), match=r"f\.npy: "):
        load_support(tmp_path / "f.npy")


def test_bfloat16_is_exact(tmp_path):
    tensor = torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16)
    safetensors.torch.save_file({"x": tensor}, tmp_path / "f.safetensors")
    torch.save(tensor, tmp_path / "f.pt")
    for name in ("f.safetensors", "f.pt"):
        support = load_support(tmp_path / name)
        assert support.dtype == torch.bfloat16
        assert support.points.float().tolist() == [[1.5, 2.5]]


def test_list_of_tensors_and_parameters(tmp_path):
    torch.save([torch.ones(2), torch.zeros(2)], tmp_path / "f.pt")
    assert load_support(tmp_path / "f.pt").points.tolist() == [[1, 1], [0, 0]]
    torch.save([torch.ones(2), torch.zeros(3)], tmp_path / "f.pt")
    with pytest.raises(ValueError, match=r"different shapes \(2,\), \(3,\)"):
        load_support(tmp_path / "f.pt")
    torch.save({"w": torch.nn.Parameter(torch.ones(2, 2))}, tmp_path / "f.pt")
    assert not load_support(tmp_path / "f.pt").points.requires_grad
    torch.save({"epoch": 3}, tmp_path / "f.pt")
    with pytest.raises(ValueError, match="no references"):
        load_support(tmp_path / "f.pt")


def test_weights_come_by_name(tmp_path):
    np.savez(tmp_path / "f.npz", x=VALUES, w=np.arange(12.0))
    support = load_support(tmp_path / "f.npz", weights="w")
    np.testing.assert_allclose(support.weights.numpy(), np.arange(12) / 66, rtol=1e-15)


def test_header_that_promises_too_much_is_not_believed(tmp_path):
    np.save(tmp_path / "f.npy", VALUES)
    data = (tmp_path / "f.npy").read_bytes().replace(b"(12, 3)", b"(9" + b"9" * 11 + b", 3)")
    (tmp_path / "f.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"f\.npy: "):
        load_support(tmp_path / "f.npy")
    (tmp_path / "f.idx").write_bytes(struct.pack(">BBBB2I", 0, 0, 0x0D, 2, 2**32 - 1, 2**32 - 1) + b"1234")
    with pytest.raises(ValueError, match="truncated"):
        load_support(tmp_path / "f.idx")
    (tmp_path / "f.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}      ")
    with pytest.raises(ValueError, match="truncated"):
        load_support(tmp_path / "f.safetensors")


# -- tables -----------------------------------------------------------------------------------------------------------


def test_numeric_columns_lie_side_by_side_and_are_named(tmp_path):
    parquet.write_table(table(False).append_column("text", [["t"] * 12]), tmp_path / "f.parquet")
    support = load_support(tmp_path / "f.parquet", label="kind")
    assert np.array_equal(support.points.numpy(), VALUES)
    assert support.notes == ("columns: x0, x1, x2", "columns left out: text")
    chosen = load_support(tmp_path / "f.parquet", columns=["x2", "x0"], weights="kind")
    assert np.array_equal(chosen.points.numpy(), VALUES[:, [2, 0]])
    assert chosen.weights[0] == 0


def test_chunked_sliced_and_nested_vectors(tmp_path):
    images = pa.array(VALUES.reshape(6, 2, 3).tolist(), pa.list_(pa.list_(pa.float32())))
    whole = pa.chunked_array([images[:2], images[2:5], images[5:]])
    with ipc.new_file(tmp_path / "f.arrow", pa.schema({"image": whole.type})) as writer:
        writer.write_table(pa.table({"image": whole}))
    support = load_support(tmp_path / "f.arrow")
    assert np.array_equal(support.points.numpy(), VALUES.reshape(6, 2, 3))
    assert np.array_equal(load_support(tmp_path / "f.arrow", limit=3).points.numpy(), VALUES.reshape(6, 2, 3)[:3])


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 2), pa.large_list(pa.float64())])
def test_missing_vectors_are_bad_rows(tmp_path, kind):
    parquet.write_table(pa.table({"v": pa.array([[1.0, 2.0], None, [3.0, 4.0]], kind)}), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match="1 bad row .*index 1"):
        load_support(tmp_path / "f.parquet")
    support = load_support(tmp_path / "f.parquet", drop_nonfinite=True)
    assert support.points.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert support.rows.tolist() == [0, 2]


def test_missing_numbers_are_bad_rows(tmp_path):
    (tmp_path / "f.csv").write_text("a,b\n1,2\n,4\n5,6\n")
    with pytest.raises(ValueError, match="1 bad row .*index 1"):
        load_support(tmp_path / "f.csv")


def test_ragged_vectors_are_refused_with_their_lengths(tmp_path):
    parquet.write_table(pa.table({"v": [[1.0], [1.0, 2.0, 3.0]]}), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match="'v': ragged vectors, of lengths 1 to 3"):
        load_support(tmp_path / "f.parquet")


def test_csv_without_a_header_loses_no_row(tmp_path):
    (tmp_path / "f.csv").write_text("1.5,2\n3,4\n")
    assert load_support(tmp_path / "f.csv").points.tolist() == [[1.5, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"t": ["a"]}, {}, r"no numeric column .*\(columns: t\)"),
        ({"u": [[1.0]], "v": [[1.0]]}, {}, "several columns of vectors, choose one with key=: u, v"),
        ({"u": [1.0]}, {"label": "z"}, "label: no 'z'; the file holds u"),
        ({"u": [1.0]}, {"key": "z"}, "columns: no 'z'; the file holds u"),
        ({"u": [1.0], "t": ["a"]}, {"columns": ["u", "t"]}, "'t': expected numbers or vectors, got string"),
        ({"u": [1.0], "v": [[1.0]]}, {"columns": ["u", "v"]}, "got 'v' beside others"),
        ({"u": [1.0], "k": pa.array([None], pa.int64())}, {"label": "k"}, "1 labels missing, first at index 0"),
    ],
)
def test_tables_without_clear_points_are_refused(tmp_path, columns, options, message):
    parquet.write_table(pa.table(columns), tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=message):
        load_support(tmp_path / "f.parquet", **options)


def save_dataset(folder: Path, rows: pa.Table, features: dict) -> None:
    """What datasets.Dataset.save_to_disk writes."""
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (rows.slice(0, 5), rows.slice(5)), strict=True):
        with ipc.new_stream(folder / name, rows.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


CLASSES = {"kind": {"names": ["zero", "one", "two"], "_type": "ClassLabel"}}


def test_saved_data_set_with_its_splits_and_class_names(tmp_path):
    for split in ("train", "test"):
        save_dataset(tmp_path / "set" / split, table(), CLASSES)
    (tmp_path / "set" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    support = load_support(tmp_path / "set", key="train")
    assert np.array_equal(support.points.numpy(), VALUES)
    assert support.label_names == ("one", "two", "zero")
    assert [support.label_names[c] for c in support.labels[:3]] == ["zero", "one", "two"]
    with pytest.raises(ValueError, match="key=: train, test"):
        load_support(tmp_path / "set")
    assert torch.equal(load_support(tmp_path / "set" / "test").points, support.points)


def test_saved_data_set_applies_its_index(tmp_path):
    save_dataset(tmp_path / "set", table(), CLASSES)
    state = json.loads((tmp_path / "set" / "state.json").read_text())
    index = pa.table({"indices": pa.array([3, 1], pa.uint64())})
    with ipc.new_stream(tmp_path / "set" / "indices.arrow", index.schema) as writer:
        writer.write_table(index)
    state["_indices_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "set" / "state.json").write_text(json.dumps(state))
    assert np.array_equal(load_support(tmp_path / "set").points.numpy(), VALUES[[3, 1]])


def test_saved_data_set_cannot_reach_outside_of_its_folder(tmp_path):
    save_dataset(tmp_path / "set", table(), CLASSES)
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(ValueError, match="outside of the folder"):
        load_support(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("[not json")
    with pytest.raises(ValueError, match="not readable JSON"):
        load_support(tmp_path / "set")


# -- images -----------------------------------------------------------------------------------------------------------


def save_image(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, size=shape, dtype=np.uint8)


def test_class_folders_are_labels_and_pixels_are_exact(tmp_path):
    image = pixels(4, 6, 3)
    save_image(tmp_path / "cat" / "b.png", image)
    save_image(tmp_path / "cat" / "a.png", 255 - image)
    save_image(tmp_path / "ant" / "c.png", image)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    support = load_support(tmp_path)
    assert support.points.shape == (3, 3, 4, 6)
    assert [support.label_names[c] for c in support.labels] == ["ant", "cat", "cat"]
    assert [p.name for p in list_images(tmp_path)[0]] == ["c.png", "a.png", "b.png"]
    expected = torch.from_numpy(image).permute(2, 0, 1) / 255
    assert torch.equal(support.points[0], expected)
    torch.testing.assert_close(support.points[1], 1 - expected)


def test_grey_images_have_one_channel_and_sixteen_bits_are_kept(tmp_path):
    deep = np.array([[0, 65535], [257, 1]], dtype=np.uint16)
    save_image(tmp_path / "a.png", deep)
    save_image(tmp_path / "b.png", pixels(2, 2))
    support = load_support(tmp_path)
    assert support.labels is None
    torch.testing.assert_close(support.points[0, 0], torch.from_numpy(deep / 65535).float(), rtol=1e-7, atol=0)


def test_mixed_sizes_raise_with_their_count_until_a_size_is_given(tmp_path):
    for i in range(3):
        save_image(tmp_path / f"{i}.png", pixels(4, 4, 3))
    save_image(tmp_path / "9.png", pixels(4, 8, 3))
    with pytest.raises(ValueError, match=r"4 images of 2 sizes, 4x4 \(3\), 4x8 \(1\); pass size="):
        load_support(tmp_path)
    support = load_support(tmp_path, size=(4, 4))
    assert support.points.shape == (4, 3, 4, 4)
    assert "1 image changed aspect ratio" in support.notes
    assert torch.equal(support.points[0], torch.from_numpy(pixels(4, 4, 3)).permute(2, 0, 1) / 255)


def test_alpha_and_orientation_are_not_lost_silently(tmp_path):
    save_image(tmp_path / "a.png", np.dstack([pixels(2, 3, 3), np.full((2, 3), 9, dtype=np.uint8)]))
    assert "alpha channel of 1 image left out" in load_support(tmp_path).notes
    (tmp_path / "a.png").unlink()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    Image.fromarray(pixels(2, 3)).save(tmp_path / "b.png", exif=exif)
    turned = load_support(tmp_path).points[0, 0]
    assert torch.equal(turned, torch.from_numpy(np.rot90(pixels(2, 3), -1).copy()) / 255)


def test_an_encoder_turns_images_into_features_in_batches(tmp_path):
    for i in range(40):
        save_image(tmp_path / f"{i:02}.png", np.full((2, 2), i, dtype=np.uint8))
    sizes = []

    def mean_and_size(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return torch.stack([x.mean((1, 2, 3)), torch.full((len(x),), float(x.shape[-1]))], 1)

    support = load_support(tmp_path, encoder=mean_and_size, size=8)
    torch.testing.assert_close(support.points[:, 0], torch.arange(40) / 255)
    assert (support.points[:, 1] == 8).all()
    assert sizes == [32, 8]
    with pytest.raises(ValueError, match=r"encoder: expected features of shape \(32, d\)"):
        load_support(tmp_path, encoder=lambda x: x)


def test_broken_images_and_folders_are_named(tmp_path):
    save_image(tmp_path / "x" / "a.png", pixels(32, 32, 3))
    data = (tmp_path / "x" / "a.png").read_bytes()
    (tmp_path / "x" / "a.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"a\.png: file is truncated"):
        load_support(tmp_path)
    (tmp_path / "x" / "a.png").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"a\.png: is an HTML page, not an image"):
        load_support(tmp_path)
    (tmp_path / "x" / "a.png").write_bytes(b"abc")
    with pytest.raises(ValueError, match=r"a\.png: is not a readable image"):
        load_support(tmp_path)
    save_image(tmp_path / "b.png", pixels(2, 2))
    with pytest.raises(ValueError, match="1 image beside class subfolders with 1"):
        load_support(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no references: neither images"):
        load_support(tmp_path / "empty")


def test_images_inside_a_saved_data_set(tmp_path):
    def encoded(value: int) -> dict:
        buffer = io.BytesIO()
        Image.fromarray(np.full((2, 2), value, dtype=np.uint8)).save(buffer, "PNG")
        return {"bytes": buffer.getvalue(), "path": "/never/followed.png"}

    column = pa.array([encoded(v) for v in range(12)], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    features = {"image": {"_type": "Image"}, **CLASSES}
    save_dataset(tmp_path / "set", pa.table({"image": column, "kind": LABELS}), features)
    support = load_support(tmp_path / "set", limit=4)
    torch.testing.assert_close(support.points[:, 0, 0, 0], torch.arange(4) / 255)
    assert support.label_names == ("one", "two", "zero")


class TinyTransformer(torch.nn.Module):
    """Tokens [CLS, patches] where every CLS token counts its image's pixels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(patch_size=14, model_type=kind)

    def forward(self, pixel_values: torch.Tensor) -> types.SimpleNamespace:
        cls = pixel_values.mean((2, 3))
        tokens = torch.stack([cls, cls + 100, cls + 100], 1)
        return types.SimpleNamespace(last_hidden_state=tokens, pooler_output=cls + 1)


@pytest.mark.parametrize(("kind", "shift"), [("dinov2", 0.0), ("clip_vision_model", 1.0)])
def test_encoder_takes_the_class_token_and_warns_about_uncovered_pixels(kind, shift):
    encoder = TransformersEncoder(TinyTransformer(kind), (0.5,) * 3, (0.25,) * 3, "tiny")
    x = torch.full((2, 1, 28, 28), 0.75)
    torch.testing.assert_close(encoder(x), torch.full((2, 3), 1.0 + shift))
    with pytest.warns(PatchWarning, match="30x28 pixels are not divisible by the patch size 14; 2 rows and 0 columns"):
        encoder(torch.zeros(1, 3, 30, 28))


def test_encoder_folders_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="encoder: no folder with a config"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ValueError, match="got 'bert'; pass a callable"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("registers", [False, True])
def test_encoder_of_a_real_architecture(tmp_path, registers):
    transformers = pytest.importorskip("transformers")
    name = "Dinov2WithRegisters" if registers else "Dinov2"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    save_image(tmp_path / "images" / "a.png", pixels(28, 28, 3))
    with pytest.warns(UserWarning, match="ImageNet's mean and std"):
        support = load_support(tmp_path / "images", encoder=tmp_path / "model")
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).reshape(2, 3, 1, 1)
    x = (torch.from_numpy(pixels(28, 28, 3)).permute(2, 0, 1)[None] / 255 - mean) / std
    with torch.no_grad():
        torch.testing.assert_close(support.points, model(x).pooler_output)


# -- idx and bundled --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_idx_images_find_their_labels(tmp_path, gz):
    images, labels = pixels(5, 4, 3), np.arange(5, dtype=np.uint8)
    path = write_idx(tmp_path / f"train-images-idx3-ubyte{gz}", images, 0x08)
    write_idx(tmp_path / f"train-labels-idx1-ubyte{gz}", labels, 0x08)
    for source in (path, tmp_path):
        support = load_support(source)
        assert torch.equal(support.points, torch.from_numpy(images) / 255)
        assert support.labels.tolist() == labels.tolist()
        assert load_support(source, limit=2).labels.tolist() == [0, 1]
    with pytest.raises(FileNotFoundError, match="has no t10k-images"):
        load_support(tmp_path, key="test")
    with pytest.raises(ValueError, match="expected 'train' or 't10k', got 'x'"):
        load_support(tmp_path, key="x")


@pytest.mark.parametrize(("code", "dtype"), [(0x09, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")])
def test_idx_types(tmp_path, code, dtype):
    array = np.array([[1, 2], [-3, 4]], dtype=dtype)
    assert load_support(write_idx(tmp_path / "f.idx", array, code)).points.tolist() == array.tolist()


@pytest.mark.parametrize("name", ["f.idx", "f.idx.gz"])
def test_cut_or_foreign_idx_files(tmp_path, name):
    path = write_idx(tmp_path / name, pixels(50, 4), 0x08)
    data = path.read_bytes()
    for n in (3 if name == "f.idx" else 12, len(data) // 2, len(data) - 9):
        path.write_bytes(data[:n])
        with pytest.raises(ValueError, match="file is truncated"):
            load_support(path)
    path.write_bytes(gzip.compress(b"abcdefgh") if name.endswith("gz") else b"abcdefgh")
    with pytest.raises(ValueError, match="is not an idx file"):
        load_support(path)


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    support = load_support("digits")
    assert np.array_equal(support.points.numpy().reshape(-1, 64) * 16, x)
    assert support.labels.tolist() == y.tolist()
    assert (support.event_shape, support.label_names) == ((8, 8), tuple(range(10)))


def test_fashion_mnist_is_found_by_its_variable_or_said_to_be_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("NWFLOW_FASHION_MNIST", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist") as caught:
        load_support("fashion-mnist")
    assert isinstance(caught.value, ValueError)
    images = pixels(5, 28, 28)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images, 0x08)
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images[:2], 0x08)
    assert torch.equal(load_support("fashion-mnist").points, torch.from_numpy(images) / 255)
    assert load_support("fashion-mnist", key="test").m == 2


def test_installed_fashion_mnist():
    try:
        support = load_support("fashion-mnist", key="test", limit=1000)
    except MissingDataError as error:
        pytest.skip(str(error))
    assert (support.event_shape, support.m) == ((28, 28), 1000)
    assert sorted(support.label_names) == list(range(10))
    assert float(support.points.max()) == 1.0


# -- sources and options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.npy", r"nowhere\.npy: no such file or folder, and no bundled set \(digits, fashion-mnist\)"),
        ("https://example.org/x.npy", "got a URL; nothing is downloaded"),
    ],
)
def test_sources_that_are_not_there(source, message):
    with pytest.raises(ValueError, match=message):
        load_support(source)
    with pytest.raises(TypeError, match="source: expected a path"):
        load_support(np.zeros(3))


def test_unknown_extension_lists_the_known_ones(tmp_path):
    (tmp_path / "f.xyz").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"f\.xyz: expected one of the extensions \.npy, .*got '\.xyz'"):
        load_support(tmp_path / "f.xyz")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("digits", {"size": 8}),
        ("digits", {"key": "train"}),
        ("f.npy", {"key": "a"}),
        ("f.npy", {"columns": ["a"]}),
        ("f.csv", {"encoder": lambda x: x}),
        ("f.idx", {"weights": "w"}),
    ],
)
def test_options_without_a_meaning_are_refused(tmp_path, name, options):
    if name != "digits":
        (tmp_path / name).write_bytes(b"x")
        name = tmp_path / name
    with pytest.raises(ValueError, match=f"{next(iter(options))}: no meaning for"):
        load_support(name, **options)


def test_limit_is_positive():
    with pytest.raises(ValueError, match="limit: expected at least 1, got 0"):
        load_support("digits", limit=0)


# -- normalisation, scale, width --------------------------------------------------------------------------------------


def test_normalisation_gives_unit_norms_and_is_noted(tmp_path):
    np.save(tmp_path / "f.npy", VALUES * np.float32(1e25))  # squares overflow float32
    support = load_support(tmp_path / "f.npy", normalize=True)
    torch.testing.assert_close(support.points.norm(dim=1), torch.ones(12))
    assert any(note.startswith("normalized") for note in support.notes)
    with pytest.raises(ValueError, match="2 zero rows .*first at index 1"):
        unit_norm(torch.tensor([[1.0], [0.0], [0.0]]))


def test_normalisation_is_differentiable():
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit_norm, x)


def test_scale_that_differs_warns():
    refs = unit_norm(torch.randn(10, 5))
    with pytest.warns(ScaleWarning, match=r"query has mean norm 45 but refs\.npy has mean norm 1"):
        assert check_same_scale(45 * refs, Support(refs), support_name="refs.npy") == pytest.approx(45)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_same_scale(1.9 * refs, refs) == pytest.approx(1.9)
        assert check_same_scale(torch.zeros(2, 3), torch.zeros(1, 3)) == 1
    with pytest.warns(ScaleWarning):
        assert check_same_scale(torch.zeros(2, 3), torch.ones(1, 3)) == float("inf")


@pytest.mark.parametrize("width", [1664, 1024])
def test_widths_that_differ_are_named(width):
    with pytest.raises(ValueError, match=rf"q\.npy has width {width} but refs\.npy has width 1280"):
        check_widths(torch.zeros(4, width), Support(torch.zeros(10, 1280)), "q.npy", "refs.npy")
    check_widths(torch.zeros(4, 1280), Support.batch([torch.zeros(10, 1280)]))
    with pytest.raises(ValueError, match=r"event shape \(3, 4\) .*event shape \(4,\)"):
        check_widths(torch.zeros(2, 3, 4), torch.zeros(2, 4))


# -- saving -----------------------------------------------------------------------------------------------------------

META = {"path": "CondOT", "seed": 3, "normalized": True, "versions": {"torch": "2"}}


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".npy", ".parquet", ".csv"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saved_points_come_back_bit_for_bit(tmp_path, suffix, shape, dtype):
    path, points = tmp_path / f"f{suffix}", torch.randn(*shape, dtype=dtype)
    if suffix == ".csv" and len(shape) > 2:
        with pytest.raises(ValueError, match=r"vectors \(m, d\), got shape \(5, 2, 3\)"):
            save_points(path, points)
        assert list(tmp_path.iterdir()) == []
        return
    assert save_points(path, points, META) == path
    support = load_support(path)
    loaded = support.points if suffix not in (".csv", ".parquet") or len(shape) > 1 else support.points[:, 0]
    assert torch.equal(loaded.to(dtype), points)
    if suffix in (".safetensors", ".npz", ".parquet"):
        assert read_metadata(path) == {
            "path": "CondOT",
            "seed": "3",
            "normalized": "true",
            "versions": '{"torch": "2"}',
        }
        assert any(note.startswith("normalized: the file says") for note in support.notes)
    else:
        assert read_metadata(path) == {}


def test_nothing_is_overwritten_without_force(tmp_path):
    path = save_points(tmp_path / "f.npy", torch.zeros(2, 1))
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"f\.npy: is there already"):
        save_points(path, torch.ones(3, 1))
    assert path.read_bytes() == before
    save_points(path, torch.ones(3, 1), force=True)
    assert load_support(path).m == 3
    assert [p.name for p in tmp_path.iterdir()] == ["f.npy"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = save_points(tmp_path / "f.npy", torch.zeros(2, 1))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="bfloat16"):
        save_points(path, torch.zeros(2, 1, dtype=torch.bfloat16), force=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["f.npy"]


def test_extra_arrays_go_where_there_is_room(tmp_path):
    extra = {"n_eff": torch.tensor([1.0, 2.0]), "attribution": torch.tensor([[0], [1]])}
    for suffix in (".safetensors", ".npz"):
        path = save_points(tmp_path / f"f{suffix}", torch.zeros(2, 3), extra=extra)
        assert load_support(path).event_shape == (3,)
        assert load_support(path, key="n_eff").points.tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="extra: .npy holds one array"):
        save_points(tmp_path / "f.npy", torch.zeros(2, 3), extra=extra)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("f.txt", ValueError, "expected one of the extensions .*got '.txt'"),
        ("no/f.npy", FileNotFoundError, "the folder .*no does not exist"),
        ("folder.npy", IsADirectoryError, "is a folder"),
    ],
)
def test_places_that_cannot_be_written(tmp_path, name, error, message):
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(error, match=message):
        save_points(tmp_path / name, torch.zeros(1, 1))


# -- references are never averaged ------------------------------------------------------------------------------------


def test_references_are_kept_apart(tmp_path):
    support = load_support(save_points(tmp_path / "refs.npy", torch.tensor([-1.0, 1.0])))
    s, w = support.points.double(), support.weights.double()
    logits = w.log() - (0.5 - 0.5 * s) ** 2 / 0.5
    assert float(torch.softmax(logits, 0) @ s) == pytest.approx(0.7615941560, abs=1e-9)  # the average alone gives 0
