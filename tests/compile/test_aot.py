"""Folders compiled ahead of time: what is written is found again, and anything else is refused."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvgen.compile import (
    Image,
    Launchers,
    Manifest,
    Unit,
    compile_many,
    compile_unit,
    find,
    nvrtc_version,
    read_folder,
    text_digest,
    write_folder,
)
from kvgen.errors import ArgumentError, ToolError

from .tiny import TEXT, unit_of


@pytest.fixture(scope="module")
def images() -> list[Image]:
    unit = unit_of()
    return compile_many([(unit, "sm_80", "cubin"), (unit, "sm_90a", "cubin")], cache=None)


DIGEST = text_digest(TEXT)
DIGESTS = {"tiny/reverse": DIGEST}


@pytest.fixture
def folder(tmp_path: Path, images: list[Image]) -> Path:
    write_folder(tmp_path / "cubins", images, DIGESTS)
    return tmp_path / "cubins"


def edit(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["kernels"][0].update(change)
    path.write_text(json.dumps(content))


def test_round_trip(folder: Path, images: list[Image]) -> None:
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["manifest.json", "tiny/reverse.sm_80.cubin", "tiny/reverse.sm_90a.cubin"]
    manifest = read_folder(folder)
    assert manifest.archs("tiny", "reverse") == ["sm_80", "sm_90a"]
    for image in images:
        assert find(manifest, "tiny", "reverse", image.arch, DIGEST) == image.data
        entry = manifest.entry("tiny", "reverse", image.arch)
        assert entry is not None
        assert entry.resources == image.resources
        assert entry.entry == "reverse"
        assert entry.nvrtc == "{}.{}".format(*nvrtc_version())


def test_written_twice_is_the_same(folder: Path, tmp_path: Path, images: list[Image]) -> None:
    first = write_folder(tmp_path / "again", reversed(images), DIGESTS)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (folder / "manifest.json").read_bytes()
    assert read_folder(tmp_path / "again") == first


def test_other_sets_stay_and_the_same_set_is_replaced(folder: Path, images: list[Image]) -> None:
    other = compile_unit(unit_of(name="other/reverse"), "sm_80", cache=None)
    write_folder(folder, [other], {"other/reverse": DIGEST})
    assert read_folder(folder).archs("tiny", "reverse") == ["sm_80", "sm_90a"]
    write_folder(folder, images[:1], DIGESTS)
    manifest = read_folder(folder)
    assert manifest.archs("tiny", "reverse") == ["sm_80"]
    assert find(manifest, "other", "reverse", "sm_80", DIGEST) == other.data
    assert not (folder / "tiny" / "reverse.sm_90a.cubin").exists()


def test_writing_mends_a_broken_manifest(folder: Path, images: list[Image]) -> None:
    (folder / "manifest.json").write_text("{")
    write_folder(folder, images, DIGESTS)
    assert find(read_folder(folder), "tiny", "reverse", "sm_80", DIGEST) == images[0].data


def refused(manifest: Manifest, arch: str = "sm_80", digest: str = DIGEST, kernel: str = "reverse") -> str:
    with pytest.raises(ToolError) as caught:
        find(manifest, "tiny", kernel, arch, digest)
    message = str(caught.value)
    assert f"`kvgen compile -o {manifest.folder}`" in message
    return message


def test_refusals_of_find(folder: Path) -> None:
    manifest = read_folder(folder)
    path = folder / "tiny" / "reverse.sm_80.cubin"
    assert f"was compiled from text with digest {DIGEST[:12]}" in refused(manifest, digest="0" * 64)
    assert str(path) in refused(manifest, digest="0" * 64)
    assert "no cubin of tiny/reverse for sm_120f (it has sm_80, sm_90a)" in refused(manifest, "sm_120f")
    assert "no cubin of tiny/forward for sm_80 (it has no target)" in refused(manifest, kernel="forward")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert f"{path}: its bytes are not those" in refused(manifest)
    path.unlink()
    assert f"{path}: cannot be read (No such file" in refused(manifest)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "tiny" / "reverse.sm_80.cubin"
    path.rename(tmp_path / "outside.cubin")
    path.symlink_to(tmp_path / "outside.cubin")
    assert "leads out of the folder" in refused(read_folder(folder))


@pytest.mark.parametrize("file", ["../outside.cubin", "/etc/passwd", "a/../../b", "C:/x", "..\\x"])
def test_a_path_out_of_the_folder_is_refused(folder: Path, file: str) -> None:
    edit(folder, {"file": file})
    with pytest.raises(ToolError, match=r"manifest\.json: file: got .*must stay inside the folder; `kvgen compile -o"):
        read_folder(folder)


SET = (
    '{"schema": 1, "kernels": [], "sets": [{"set": "a", "file": "a/launchers.py", "digest": "0", "sha256": "0", "abi": 8, '
    '"kernels": {}, "by_arch": %s}]}'
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "got a list of 0; it must be a JSON object"),
        ("{}", "got schema null; this kvgen reads schema 1"),
        ('{"schema": 1, "schema": 1}', "the key 'schema' is given twice"),
        ('{"schema": NaN}', "NaN is not a JSON number"),
        ('{"schema": 99, "kernels": []}', "got schema 99"),
        ('{"schema": 1}', "has no field 'kernels'"),
        ('{"schema": 1, "kernels": [{"set": "a"}]}', "has no field 'kernel'"),
        (SET % "[]", "by_arch: got a list of 0; it must be an object of kernels by architecture"),
        (
            SET % '{"decode": 3}',
            "by_arch: got an object of 1 fields; it must be an object of kernels by architecture",
        ),
        (SET % '{"decode": {"sm_90a": 3}}', "sm_90a: got 3; it must be a string"),
        ('{"schema": 1, "kernels": 3}', "not iterable"),
    ],
)
def test_malformed_manifest(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ToolError) as caught:
        read_folder(tmp_path)
    assert said in str(caught.value)
    assert f"`kvgen compile -o {tmp_path}`" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"digest": 7}, "digest: got 7; it must be a string"), ({"resources": {"registers": "x"}}, "has no field")],
)
def test_malformed_entry(folder: Path, change: dict[str, Any], said: str) -> None:
    edit(folder, change)
    with pytest.raises(ToolError, match=said):
        read_folder(folder)


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"manifest\.json: cannot be read \(No such file"):
        read_folder(tmp_path / "nowhere")


def test_images_that_cannot_be_written(tmp_path: Path, unit: Unit, images: list[Image]) -> None:
    ptx = compile_unit(unit, "sm_80", "ptx", cache=None)
    with pytest.raises(ArgumentError, match="got ptx of tiny/reverse; only cubins"):
        write_folder(tmp_path, [ptx], DIGESTS)
    with pytest.raises(ArgumentError, match="digests: nothing for tiny/reverse"):
        write_folder(tmp_path, images, {})
    with pytest.raises(ArgumentError, match="tiny/reverse for sm_80 is given twice"):
        write_folder(tmp_path, [images[0], images[0]], DIGESTS)
    escaping = compile_unit(unit_of(name="../reverse"), "sm_80", cache=None)
    with pytest.raises(ArgumentError, match=r"got a unit called '\.\./reverse'; it must be <set>/<kernel>"):
        write_folder(tmp_path, [escaping], {"../reverse": DIGEST})
    assert list(tmp_path.iterdir()) == [], "nothing is written before everything is checked"
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolError, match="cannot be written"):
        write_folder(tmp_path / "file", images, DIGESTS)


def test_a_manifest_or_cubin_that_is_no_file(folder: Path) -> None:
    """A FIFO would be waited for, a device never end."""
    manifest, path = read_folder(folder), folder / "tiny" / "reverse.sm_80.cubin"
    for place, read in (
        (path, lambda: find(manifest, "tiny", "reverse", "sm_80", DIGEST)),
        (folder / "manifest.json", lambda: read_folder(folder)),
    ):
        place.unlink()
        os.mkfifo(place)
        with pytest.raises(ToolError) as caught:
            read()
        assert str(caught.value) == f"{place}: not a file but a FIFO; `kvgen compile -o {folder}` makes it anew"


@pytest.mark.parametrize("name", ["set", "kernel", "arch", "digest", "file"])
def test_what_a_manifest_says_reaches_no_terminal(folder: Path, name: str) -> None:
    edit(folder, {name: "a\x1b[31m\nb"})
    with pytest.raises(ToolError) as caught:
        read_folder(folder)
    assert f"{name}: got 'a\\x1b[31m\\nb'; it must be one line of text; `kvgen" in str(caught.value)
    assert str(caught.value).isprintable()


def test_nothing_is_written_through_a_link(folder: Path, tmp_path: Path, images: list[Image]) -> None:
    (tmp_path / "outside").mkdir()
    (folder / "tiny").rename(tmp_path / "kept")
    (folder / "tiny").symlink_to(tmp_path / "outside")
    with pytest.raises(ToolError, match=r"tiny: a link to .*outside; nothing is written through a link"):
        write_folder(folder, images, DIGESTS)
    assert not list((tmp_path / "outside").iterdir())


def test_writers_at_once_lose_no_set(tmp_path: Path) -> None:
    """Several processes compile into one folder; each thread here has a lock of its own, as a process has."""

    def write(writer: int) -> None:
        for i in range(8):
            write_folder(tmp_path, [], {}, {f"s{writer}_{i}": Launchers("launchers", "table")})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.set for each in read_folder(tmp_path).sets] == sorted(f"s{w}_{i}" for w in range(4) for i in range(8))
    assert not [path for path in tmp_path.rglob(".*")]
