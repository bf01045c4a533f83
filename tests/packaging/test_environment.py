"""`make` in a copy of its own files, with indexes of small wheels in folders: what it installs, whence, and what it says."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from wheels import BACKEND, make_wheel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "install"))

import download  # noqa: E402
import environment  # noqa: E402

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "twostroke"
version = "0.1.0"
dependencies = ["torch>=2.11,<2.14", "numpy>=1.26"]
"""
VERSIONS = "torch==2.13.0\nnumpy==2.4.6\n"


@pytest.fixture
def indexes(tmp_path: Path) -> tuple[Path, Path]:
    """PyPI as it is for torch, which brings packages for GPUs, and an index of builds for CPUs, which has torch alone."""
    everything, cpu = tmp_path / "pypi", tmp_path / "cpu"
    make_wheel(everything, "torch", "2.13.0", ["nvidia-cublas==13.0", "triton==3.9", "sympy"], payload_bytes=3_000_000)
    make_wheel(everything, "nvidia-cublas", "13.0", payload_bytes=5_000_000)
    make_wheel(everything, "triton", "3.9", payload_bytes=2_000_000)
    make_wheel(everything, "sympy", "1.14.0")
    for version in ("2.4.6", "2.5.0"):
        make_wheel(everything, "numpy", version)
    make_wheel(cpu, "torch", "2.13.0+cpu", ["sympy"], payload_bytes=1_000_000)
    return everything, cpu


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder, with a space in its name, that holds what `make` needs and a package without a build."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "install", folder / "install", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "requirements.lock").write_text(VERSIONS)
    return folder


def make(checkout: Path, index: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    quiet = {
        name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS", "TORCH_INDEX"))
    }
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_RETRIES": "1", "PIP_TIMEOUT": "2"}
    return subprocess.run(
        ["make", ".venv/.run", f"PYTHON={sys.executable}", *arguments],
        cwd=checkout, env=quiet | settings | variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def installed(checkout: Path) -> set[str]:
    names = (path.name.removesuffix(".dist-info") for path in (checkout / ".venv").glob("lib/*/site-packages/*.dist-info"))
    return {name for name in names if not name.startswith(("pip-", "setuptools-"))}


@pytest.mark.skipif(environment.has_nvidia_device(), reason="this machine shows an NVIDIA device")
def test_without_a_gpu_torch_alone_comes_from_the_named_index(checkout: Path, indexes: tuple[Path, Path]) -> None:
    everything, cpu = indexes
    done = make(checkout, everything.as_uri(), TORCH_INDEX_URL=cpu.as_uri())
    assert done.returncode == 0, done.stderr
    assert installed(checkout) == {"torch-2.13.0+cpu", "sympy-1.14.0", "numpy-2.4.6", "twostroke-0.1.0"}


@pytest.mark.skipif(environment.has_nvidia_device(), reason="this machine shows an NVIDIA device")
def test_an_interrupted_installation_is_made_again_and_a_whole_one_is_kept(checkout: Path, indexes: tuple[Path, Path]) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "pyvenv.cfg").write_text("home = /nowhere\n")
    (checkout / ".venv" / "half-unpacked").write_text("")
    done = make(checkout, indexes[0].as_uri())
    assert done.returncode == 0, done.stderr
    assert "left unfinished" in done.stderr
    assert not (checkout / ".venv" / "half-unpacked").exists()
    assert "nvidia_cublas-13.0" in installed(checkout)
    marker = checkout / ".venv" / "mine"
    marker.write_text("")
    (checkout / ".venv" / ".run").unlink()
    assert make(checkout, indexes[0].as_uri()).returncode == 0
    assert marker.exists()


def test_an_index_that_is_out_of_reach_is_a_sentence_and_nothing_is_left_as_whole(checkout: Path) -> None:
    """pip says why it found nothing only where it tries again."""
    done = make(checkout, "http://127.0.0.1:9/simple")
    assert done.returncode != 0
    assert "pip cannot reach its package index" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (checkout / ".venv" / ".run").exists()
    assert not (checkout / ".venv" / ".whole").exists()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(environment.InstallError, match="not a virtual environment"):
        environment.make_environment(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_device_is_seen_by_the_files_of_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()  # there with the driver's tools alone
    assert not environment.has_nvidia_device(tmp_path)
    (tmp_path / "dev" / "nvidia0").touch()
    assert environment.has_nvidia_device(tmp_path)
    monkeypatch.setenv("TORCH_INDEX_URL", "https://index.example/cpu")
    assert environment.torch_index(has_gpu=False) == "https://index.example/cpu"
    assert environment.torch_index(has_gpu=True) == ""


class Index(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, says nothing, and keeps quiet about the size of numpy."""

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        if "numpy" in self.path:
            self.send_error(405)
        else:
            super().do_HEAD()


@pytest.fixture
def served(indexes: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    root = indexes[0].parent
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Index, directory=str(root))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        yield f"{address}/pypi", f"{address}/cpu"
        server.shutdown()


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[download.Package]:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return download.planned(Path(sys.executable), ["torch", "numpy==2.4.6"], ["--ignore-installed", *arguments])


def test_what_will_be_downloaded_is_said_with_its_size_and_what_makes_it_less(
    served: tuple[str, str], indexes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = plan(monkeypatch, "--index-url", served[0])
    sizes = {p.name: p.n_bytes for p in packages}
    for name in ("torch", "nvidia-cublas", "triton", "sympy"):
        assert sizes[name] == next((indexes[0] / name).glob("*.whl")).stat().st_size
    assert sizes["numpy"] is None
    text = "\n".join(download.announcement(packages, has_gpu=False))
    assert "at most 10 MB to download" in text
    assert "1 packages no server tells the size: numpy" in text
    assert "2 of these packages serve NVIDIA GPUs alone, 7 MB" in text
    assert f"make TORCH_INDEX_URL={download.CPU_INDEX_URL}" in text
    assert "TORCH_INDEX_URL" not in "\n".join(download.announcement(packages, has_gpu=True))


def test_the_named_index_is_what_is_announced(served: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """pip takes 2.13.0+cpu for newer than 2.13.0."""
    packages = plan(monkeypatch, "--index-url", served[0], "--extra-index-url", served[1])
    text = "\n".join(download.announcement(packages, has_gpu=False))
    assert "torch 2.13.0+cpu (1 MB)" in text
    assert "NVIDIA" not in text


def test_files_of_this_machine_are_no_download(indexes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(download.announcement(plan(monkeypatch, "--index-url", indexes[0].as_uri()), has_gpu=True))
    assert text == "5 packages from folders of this machine, 10 MB."
    assert download.announcement([], has_gpu=False) == ["nothing to download: every package is there."]
