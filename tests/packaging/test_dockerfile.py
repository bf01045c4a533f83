"""The Dockerfile, read always, and carried out in chroots by `make soak` where this user may make them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkout import ROOT, clean_checkout
from dockerfile import Build, Stage, instructions
from test_metadata import locked
from wheels import simple_index

TEXT = (ROOT / "Dockerfile").read_text()
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
BASE = "ca-certificates,python3,python3-venv"
"""What the image of Python in FROM has and Debian alone lacks."""

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


def test_the_compiler_stays_in_the_first_stage_and_the_server_runs_without_rights() -> None:
    first, last = TEXT.split("\nFROM ")[1:]
    assert "g++" in first
    assert "g++" not in last
    found = instructions("FROM " + last)
    users = [rest for word, rest in found if word == "USER"]
    assert users
    assert "root" not in users
    order = [word for word, _ in found]
    assert order.index("USER") < order.index("ENTRYPOINT")
    assert dict(found)["ENTRYPOINT"] == '["twostroke"]'
    assert dict(found)["EXPOSE"] == "8000"
    assert "/health" in dict(found)["HEALTHCHECK"]


def test_a_server_that_others_reach_asks_for_a_key() -> None:
    (command,) = (rest for word, rest in instructions(TEXT) if word == "CMD")
    assert '"0.0.0.0"' in command
    assert "--api-key-file" in command


def test_everything_that_is_copied_exists_and_everything_that_the_build_reads_is_copied() -> None:
    copied = {
        word for kind, rest in instructions(TEXT) if kind == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    } - {"--chown=twostroke"}
    assert all((ROOT / name).exists() for name in copied)
    assert copied >= {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src", "recipes", "requirements.lock"}


def this_machines_own() -> dict[str, str]:
    """Variables that reaching the package index from here may need."""
    names = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    found = {name: os.environ[name] for name in names if name in os.environ}
    return found | {"PIP_CERT": CERTIFICATES, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Debian with Python, in a folder."""
    if os.geteuid() != 0:
        pytest.skip("making a chroot takes root's rights")
    if shutil.which("debootstrap") is None:
        got = subprocess.run(
            ["apt-get", "install", "-qy", "--no-install-recommends", "debootstrap"], capture_output=True, check=False
        )
        if got.returncode != 0:
            pytest.skip("debootstrap is not installed and apt-get cannot install it")
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this system does not let its root mount")
    root = tmp_path / "base"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={BASE}", SUITE, str(root), MIRROR],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip(f"debootstrap cannot make Debian here: {made.stderr[-300:] or made.stdout[-300:]}")
    for name in ("/etc/resolv.conf", "/etc/hosts", CERTIFICATES):
        shutil.copy(name, root / name.lstrip("/"))
    return root


def torch_in_a_folder(root: Path) -> str:
    """The locked torch as a simple index inside ``root``, from wherever this machine's pip has it; its address there."""
    folder = root / "srv" / "index" / "torch"
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        f"torch=={locked()['torch']}",
        "-d",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        pytest.skip(f"torch cannot be downloaded here: {done.stderr[-300:]}")
    simple_index(folder)
    return "file:///srv/index"


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_its_lines_run_in_a_chroot_and_its_health_check_passes(tmp_path: Path, base: Path, assets: Path) -> None:
    index = torch_in_a_folder(base)
    build = Build(clean_checkout(tmp_path / "context"), base, tmp_path, {"TORCH_INDEX_URL": index}, this_machines_own())
    image = build.run(TEXT)
    assert [command for user, command in build.ran if user == "root"] == [
        command for _, command in build.ran if command.startswith(("apt-get", "useradd"))
    ]
    assert sum(user == "twostroke" for user, _ in build.ran) >= 4
    assert not (image.root / "usr/bin/g++").exists()
    assert list(image.root.glob("opt/twostroke/lib/*/site-packages/twostroke/kernels/native/_native.so"))
    answers_its_health_check(image, assets, tmp_path)


def answers_its_health_check(image: Stage, assets: Path, folder: Path) -> None:
    """The container's own command on a small model and a key, and HEALTHCHECK's until it succeeds."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            pytest.skip("port 8000, which the image serves on, is another program's here")
    environment = image.variables()
    (image.root / "run/secrets").mkdir(parents=True, exist_ok=True)
    (image.root / "run/secrets/api-keys").write_text("a-key-for-this-test\n")
    shutil.copytree(assets / "weights" / "stories260K", image.root / "tmp" / "stories260K")
    (image.root / "model").mkdir(mode=0o777)
    (image.root / "model").chmod(0o777)
    importing = image.words(*image.entrypoint, "import", "/tmp/stories260K/stories260K.bin", "/model/made")
    done = subprocess.run(importing, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    command = [word if word != "/model" else "/model/made" for word in image.command]
    log = folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(image.words(*image.entrypoint, *command), env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 120
        healthy = False
        while not healthy and server.poll() is None and time.monotonic() < deadline:
            time.sleep(1)
            check = subprocess.run(image.words(*image.health), env=environment, capture_output=True, check=False)
            healthy = check.returncode == 0
        assert healthy, log.read_text()[-3000:]
    finally:
        # The container's first process, which changed its user and so no longer dies with the one that made its namespace.
        (first,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split() or [str(server.pid)]
        os.kill(int(first), signal.SIGTERM)
        try:
            ended = server.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(int(first), signal.SIGKILL)
            raise
    assert ended == 0, f"SIGTERM, as `docker stop` sends it: exit code {ended}\n{log.read_text()[-3000:]}"
