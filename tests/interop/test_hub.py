"""Models by their name on the Hub, without a Hub: a cache as its client leaves it, and what the client raises."""

from __future__ import annotations

import fnmatch
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from gguf_files import small_file
from small_models import saved
from twostroke.core.errors import ConfigError, CorruptFileError, InputError, TwostrokeError
from twostroke.interop import hub
from twostroke.interop.gguf_parts import names_of_parts
from twostroke.interop.hub import HubName
from twostroke.interop.import_model import import_model

RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))


class Hub:
    """One repository: ``files`` in a folder, links to blobs in the cache once they are downloaded."""

    def __init__(self, folder: Path) -> None:
        self.files, self.snapshot, self.blobs = folder / "files", folder / "snapshots" / "c0ffee", folder / "blobs"
        for made in (self.files, self.snapshot, self.blobs):
            made.mkdir(parents=True)
        self.asked: list[dict[str, Any]] = []
        self.fails: list[Exception] = []
        self.offline = False

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append({"name": name, **options})
        if self.fails:
            raise self.fails.pop(0)
        for path in sorted(self.files.rglob("*")):
            file = path.relative_to(self.files).as_posix()
            if self.offline or not path.is_file() or not any(fnmatch.fnmatch(file, p) for p in options["allow_patterns"]):
                continue
            content = path.read_bytes()
            hashed = hashlib.sha256(content) if len(content) > 5_000 else hashlib.sha1(b"blob %d\0" % len(content) + content)
            blob, link = self.blobs / hashed.hexdigest(), self.snapshot / file
            if not link.is_symlink():
                blob.write_bytes(content)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(blob)
        return str(self.snapshot)

    def list_repo_files(self, name: str, revision: str | None = None) -> list[str]:
        if self.offline:
            raise errors.OfflineModeIsEnabled("offline")
        return [path.relative_to(self.files).as_posix() for path in self.files.rglob("*") if path.is_file()]

    def list_repo_refs(self, name: str) -> Any:
        if self.offline:
            raise errors.OfflineModeIsEnabled("offline")
        return SimpleNamespace(branches=[SimpleNamespace(name="main")], tags=[SimpleNamespace(name="v1.0")])


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    return made


def test_names_with_revisions_and_files_are_told_from_paths() -> None:
    assert hub.hub_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert hub.hub_name("openai-community/gpt2@refs/pr/1") == HubName("openai-community/gpt2", "refs/pr/1")
    assert hub.hub_name("a/b", "v1.0") == hub.hub_name("a/b@v1.0", "v1.0") == HubName("a/b", "v1.0")
    assert hub.hub_name("a/b-GGUF:Q4_K_M") == HubName("a/b-GGUF", None, "Q4_K_M")
    assert hub.hub_name("a/b-GGUF@abc:BF16/b-00001-of-00002.gguf") == HubName("a/b-GGUF", "abc", "BF16/b-00001-of-00002.gguf")
    for path in ("gpt2", "/models/x", "./a/b", "../a/b", "a/b/c", "a/b.gguf", "a/b.bin", "a b/c", "", "a/b@", "a/b:"):
        assert hub.hub_name(path) is None
    with pytest.raises(ConfigError, match="a/b@v1 names the revision 'v1', and 'v2' is asked for"):
        hub.hub_name("a/b@v1", "v2")


def test_a_log_gets_no_bars_of_a_download(there: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that is drawn again and again into a file is hundreds of lines."""
    were_disabled: list[bool] = []

    def snapshot(name: str, **options: Any) -> str:
        were_disabled.append(huggingface_hub.utils.are_progress_bars_disabled())
        return there.snapshot_download(name, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    huggingface_hub.utils.enable_progress_bars()
    (there.files / "config.json").write_text("{}")
    try:
        assert hub.download(HubName("owner/model")) == there.snapshot
    finally:
        huggingface_hub.utils.enable_progress_bars()
    assert were_disabled == [True]


@pytest.mark.parametrize(("source", "revision"), [("someone/tiny@v1.0", None), ("someone/tiny", "v1.0")])
def test_a_revision_is_asked_for(source: str, revision: str | None, there: Hub, tmp_path: Path) -> None:
    saved("llama", there.files)
    assert import_model(source, tmp_path / "m", revision=revision).source == source
    assert [(asked["name"], asked["revision"]) for asked in there.asked] == [("someone/tiny", "v1.0")]
    with pytest.raises(ConfigError, match=r"revision='v1.0' is of a model on the Hub"):
        import_model(there.files, tmp_path / "n", revision="v1.0")


def test_a_missing_revision_is_told_with_those_that_there_are(there: Hub, tmp_path: Path) -> None:
    there.fails += [errors.RevisionNotFoundError("no such", response=RESPONSE)] * 2
    with pytest.raises(InputError, match=r"someone/tiny has no revision 'v9' on the Hub. It has main, v1.0, and any"):
        import_model("someone/tiny@v9", tmp_path / "m")
    there.offline = True
    with pytest.raises(InputError, match=r"no revision 'v9' on the Hub. Give a branch, a tag or a commit"):
        import_model("someone/tiny@v9", tmp_path / "m")


def test_a_download_that_broke_goes_on_with_the_same_call(there: Hub, tmp_path: Path) -> None:
    """The client keeps what has come of a file, and goes on there when it is called again with the same words."""
    saved("llama", there.files)
    there.fails = [OSError("connection reset")]
    with pytest.raises(TwostrokeError, match=r"\(connection reset\). The same command goes on where this one stopped"):
        import_model("someone/tiny", tmp_path / "m", revision="v1.0")
    assert not (tmp_path / "m").exists()
    import_model("someone/tiny", tmp_path / "m", revision="v1.0")
    assert there.asked[0] == there.asked[1]
    assert "force_download" not in there.asked[0]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_with_another_hash_than_the_hubs_is_a_sentence(file: str, there: Hub, tmp_path: Path) -> None:
    """Large files are named by SHA-256 in the client's cache, small ones by Git's SHA-1."""
    saved("llama", there.files)
    import_model("someone/tiny", tmp_path / "m")
    blob = (there.snapshot / file).resolve()
    assert len(blob.name) == (64 if file == "model.safetensors" else 40)
    content = bytearray(blob.read_bytes())
    content[-3] ^= 1
    blob.write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        import_model("someone/tiny", tmp_path / "n")
    assert f"{file} of someone/tiny is damaged" in str(caught.value)
    assert f"Remove {blob}" in str(caught.value)
    assert not (tmp_path / "n").exists()


# --- GGUF files of a repository -----------------------------------------------------------------------------------------------


@pytest.fixture
def with_gguf(there: Hub) -> Hub:
    small_file(there.files / "tiny-Q4_K_M.gguf", "phi3", {})
    small_file(there.files / "tiny-Q8_0.gguf", "phi3")
    (there.files / "BF16").mkdir()
    small_file(there.files / "BF16" / "tiny-BF16.gguf", "phi3", in_each=6)
    for name in ("mmproj-tiny-Q8_0.gguf", "imatrix.gguf", "README.md"):
        (there.files / name).write_text("x")
    return there


@pytest.mark.parametrize("file", ["Q4_K_M", "q4_k_m", "tiny-Q4_K_M.gguf"])
def test_one_gguf_file_is_downloaded_by_type_or_name(file: str, with_gguf: Hub, tmp_path: Path) -> None:
    report = import_model(f"someone/tiny-GGUF:{file}", tmp_path / "m", revision="v1.0")
    assert (report.kind, report.dtype) == ("GGUF", "Q4_K")
    assert with_gguf.asked[0]["revision"] == "v1.0"
    assert [path.name for path in with_gguf.snapshot.iterdir()] == ["tiny-Q4_K_M.gguf"]


@pytest.mark.parametrize("file", ["BF16", "BF16/tiny-BF16-00001-of-00003.gguf"])
def test_all_parts_of_a_gguf_file_are_downloaded(file: str, with_gguf: Hub, tmp_path: Path) -> None:
    assert import_model(f"someone/tiny-GGUF:{file}", tmp_path / "m").kind == "GGUF"
    found = sorted(path.name for path in (with_gguf.snapshot / "BF16").iterdir())
    assert found == list(names_of_parts("tiny-BF16-00001-of-00003.gguf"))
    assert [path.name for path in with_gguf.snapshot.iterdir()] == ["BF16"]


def test_gguf_files_that_are_missing_or_several_are_told_with_those_that_there_are(with_gguf: Hub, tmp_path: Path) -> None:
    for wrong in ("Q2_K", "other.gguf", "Q4_K"):
        with pytest.raises(InputError, match=rf"no GGUF file '{wrong}'. It has BF16/tiny-BF16-00001-of-00003.gguf, im"):
            import_model(f"someone/tiny-GGUF:{wrong}", tmp_path / "m")
    (with_gguf.files / "tiny-UD-Q8_0.gguf").write_text("x")
    with pytest.raises(InputError, match=r"'Q8_0' is said of 2 GGUF files of someone/t: tiny-Q8_0.gguf, tiny-UD-Q8_0.gguf. N"):
        import_model("someone/t:Q8_0", tmp_path / "m")
    with pytest.raises(InputError, match=r"no config.json, but GGUF files: .*tiny-Q8_0.gguf.* as someone/t:Q4_K_M"):
        import_model("someone/t", tmp_path / "m")
    (with_gguf.files / "BF16" / "tiny-BF16-00002-of-00003.gguf").unlink()
    with pytest.raises(InputError, match=r"has not all 3 parts of .*: BF16/tiny-BF16-00002-of-00003.gguf is missing"):
        import_model("someone/t:BF16", tmp_path / "m")
    for path in with_gguf.files.rglob("*.gguf"):
        path.unlink()
    with pytest.raises(InputError, match=r"no GGUF file 'Q8_0'. It has no GGUF files at all"):
        import_model("someone/t:Q8_0", tmp_path / "m")


def test_a_gguf_file_of_the_cache_is_found_offline(with_gguf: Hub, tmp_path: Path) -> None:
    import_model("someone/tiny-GGUF:Q8_0", tmp_path / "m")
    with_gguf.offline = True
    import_model("someone/tiny-GGUF:Q8_0", tmp_path / "n")
    with pytest.raises(InputError, match=r"no GGUF file 'BF16'. It has tiny-Q8_0.gguf"):
        import_model("someone/tiny-GGUF:BF16", tmp_path / "o")


def test_a_gguf_file_with_another_hash_is_a_sentence(with_gguf: Hub, tmp_path: Path) -> None:
    import_model("someone/t:Q8_0", tmp_path / "m")
    blob = (with_gguf.snapshot / "tiny-Q8_0.gguf").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptFileError, match=r"tiny-Q8_0.gguf of someone/t is damaged"):
        import_model("someone/t:Q8_0", tmp_path / "n")
