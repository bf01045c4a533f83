"""Carries out a Dockerfile in chroots, without Docker: the instructions that ours uses, each as its reference describes it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """One ``FROM``: its file system and what later instructions and the container inherit."""

    root: Path
    user: str = "root"
    directory: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def words(self, *words: str, user: str | None = None) -> list[str]:
        """The command line that runs ``words`` inside as ``user`` (this stage's), with a /proc that ends with it."""
        inside = f"cd {shlex.quote(self.directory)} && exec {shlex.join(words)}"
        chroot = shutil.which("chroot") or "/usr/sbin/chroot"  # the stage's own PATH may lack it
        enter = [chroot, f"--userspec={user or self.user}", str(self.root), "/bin/sh", "-c", inside]
        script = f"mount -t proc proc {shlex.quote(str(self.root))}/proc && exec {shlex.join(enter)}"
        return ["unshare", "--mount", "--fork", "--pid", "--kill-child", "/bin/sh", "-c", script]

    def variables(self) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        return {"PATH": path, "HOME": home} | self.environment


def instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


class Build:
    """``base`` is a file system that stands for every image named in ``FROM``; ``arguments`` are build arguments;
    ``surroundings`` are variables of every RUN that are this machine's (certificates, proxies)."""

    def __init__(self, context: Path, base: Path, work: Path, arguments: dict[str, str], surroundings: dict[str, str]) -> None:
        self._context, self._base, self._work = context, base, work
        self._arguments, self._surroundings = arguments, surroundings
        self._stages: dict[str, Stage] = {}
        self.ran: list[tuple[str, str]] = []
        """User and command of each RUN, in order."""

    def run(self, text: str) -> Stage:
        """Every instruction in order; the last stage. Raises AssertionError where one fails, ValueError for an unknown one."""
        stage: Stage | None = None
        for word, rest in instructions(text):
            if word == "FROM":
                name = rest.split()[2] if " AS " in rest.upper() else str(len(self._stages))
                stage = self._stages[name] = Stage(self._work / f"stage-{name}")
                subprocess.run(["cp", "-a", str(self._base), str(stage.root)], check=True)
                continue
            assert stage is not None, "FROM comes first"
            self._carry_out(stage, word, rest)
        assert stage is not None
        return stage

    def _carry_out(self, stage: Stage, word: str, rest: str) -> None:
        if word == "ARG":
            name, _, default = rest.partition("=")
            stage.environment[name] = self._arguments.get(name, default)
        elif word == "ENV":
            stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "USER":
            stage.user = rest
        elif word == "WORKDIR":
            stage.directory = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)  # root's, as with Docker
        elif word == "COPY":
            self._copy(stage, shlex.split(rest))
        elif word == "RUN":
            self.ran.append((stage.user, rest))
            command = stage.words("/bin/sh", "-c", rest)
            done = subprocess.run(
                command, env=self._surroundings | stage.variables(), capture_output=True, text=True, timeout=1200
            )
            assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        elif word == "HEALTHCHECK":
            stage.health = json.loads(rest.partition(" CMD ")[2])
        elif word in ("CMD", "ENTRYPOINT"):
            setattr(stage, {"CMD": "command", "ENTRYPOINT": "entrypoint"}[word], json.loads(rest))
        elif word not in ("EXPOSE", "VOLUME"):
            raise ValueError(f"{word} is not understood here")

    def _copy(self, stage: Stage, words: list[str]) -> None:
        options = {name: value for name, _, value in (w[2:].partition("=") for w in words if w.startswith("--"))}
        *sources, target = [w for w in words if not w.startswith("--")]
        origin = self._stages[options["from"]].root if "from" in options else self._context
        there = stage.root / os.path.join(stage.directory, target).lstrip("/")
        for source in sources:
            path = origin / source.lstrip("/")
            assert path.exists(), f"COPY {source}: there is no such file"
            to = there / path.name if target.endswith("/") else there
            to.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(path, to)
            if "chown" in options:
                own = ["chown", "-R", options["chown"], "/" + str(to.relative_to(stage.root))]
                subprocess.run(["chroot", str(stage.root), *own], check=True)
