"""The formats that ``twostroke export --to`` writes, one row each. A new format is a row and a file with its writer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ConfigError, InputError
from twostroke.core.spec import ModelSpec
from twostroke.interop.gguf_mixes import PRECISIONS, WEIGHED
from twostroke.interop.moved import Held, Made

if TYPE_CHECKING:  # the command's help reads this table without torch
    from torch import Tensor


@dataclass(frozen=True)
class ExportSource:
    """A model to write: its spec, its canonical tensors, each read on access and checked to be finite (a read also moves the
    progress bar), and the directory with its ``tokenizer.json``, None if it has none. ``importance``, by canonical name: the
    mean square of each column's inputs on a text, where one was given. ``with stage(name)`` tells the bar what is done, by a
    name of ``ExportTarget.stages``."""

    directory: Path
    spec: ModelSpec
    state: Mapping[str, Tensor]
    tokenizer: Path | None
    importance: Mapping[str, Tensor] | None = None
    stage: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()


Writer = Callable[[ExportSource, Path, str], tuple[str, ...]]
"""``write(source, out, precision)`` fills ``out`` and returns notes for the report. ``out`` is an empty directory that takes
the target's place afterwards, or for a target of one file the path to create. An error removes all of it."""


def _named(place: str) -> Any:
    """The function at ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


Expects = Callable[[ExportSource, Held, str], Made]
"""``expects(source, held, precision)``: what the writer will write of ``source``, which is ``held`` so. No weight is read: the
tensors of ``source.state`` are on device "meta". Raises the errors of the writer that need no weight."""


@dataclass(frozen=True)
class ExportTarget:
    """``expects`` names what says beforehand what the writer will write. ``precisions`` are those that its writer knows, the
    default first. ``packages`` maps what it imports to what pip calls it: it does the converting, and no plan knows its time.
    ``files`` are names of files that it writes beside those of a model directory; ``suffix`` is that of a target of one file.
    ``tested_by`` names the program that opens the result in a test. ``weighed`` are the precisions whose rounding a text can
    guide. ``stages`` are what its writer does after the model has been read, where that is long."""

    name: str
    summary: str
    precisions: tuple[str, ...] = ()
    writer: str = ""
    expects: str = ""
    packages: Mapping[str, str] | None = None
    files: tuple[str, ...] = ()
    suffix: str = ""
    tested_by: str = ""
    weighed: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()

    def load_writer(self) -> Writer:
        """Its function. Raises InputError, naming what is missing, if a package is not installed."""
        missing = [name for module, name in (self.packages or {}).items() if find_spec(module) is None]
        if missing:
            raise InputError(f"--to {self.name} needs packages that are not installed. Run: pip install {' '.join(missing)}")
        writer: Writer = _named(self.writer)
        return writer

    def load_expects(self) -> Expects:
        """What says beforehand what it writes."""
        expects: Expects = _named(self.expects)
        return expects

    def precision(self, wanted: str, stored: str) -> str:
        """``wanted``; of "auto" the ``stored`` one if it can be written, else the default. Raises ConfigError if it is not
        known."""
        if wanted == "auto":
            return stored if stored in self.precisions else self.precisions[0]
        if wanted not in self.precisions:
            raise ConfigError(
                f"precision={wanted!r} is not written by --to {self.name}. Use auto, {', '.join(self.precisions)}."
            )
        return wanted


_ROWS = (
    ExportTarget(
        "hf",
        "Hugging Face directory, for transformers, vLLM and SGLang",
        ("fp32", "bf16", "fp16"),
        "twostroke.interop.export_model:write_hugging_face",
        "twostroke.interop.export_model:expect_hugging_face",
        tested_by="transformers, vLLM",
    ),
    ExportTarget(
        "mlx",
        "directory for mlx-lm on Apple hardware",
        ("bf16", "fp16", "fp32", "int8", "int4"),
        "twostroke.interop.mlx:write_mlx",
        "twostroke.interop.mlx:expect_mlx",
        tested_by="mlx-lm on a CPU",
    ),
    ExportTarget(
        "onnx",
        "graph with its KV cache as inputs and outputs, for onnxruntime and onnxruntime-genai",
        ("fp32", "fp16", "int8", "int4"),
        "twostroke.interop.onnx:write_onnx",
        "twostroke.interop.onnx:expect_onnx",
        files=("model.onnx", "model.onnx.data", "genai_config.json"),
        tested_by="onnxruntime, onnxruntime-genai",
    ),
    ExportTarget(
        "openvino",
        "OpenVINO's own files of the same graph",
        ("fp32", "fp16", "int8", "int4"),
        "twostroke.interop.openvino:write_openvino",
        "twostroke.interop.openvino:expect_openvino",
        packages={"openvino": "openvino"},
        files=("openvino_model.xml", "openvino_model.bin"),
        tested_by="OpenVINO on a CPU",
    ),
    ExportTarget(
        "executorch",
        "program for phones, for ExecuTorch's XNNPACK backend, with its KV cache inside",
        ("fp32", "int8", "int4"),
        "twostroke.interop.executorch:write_executorch",
        "twostroke.interop.static_decoder:expect_program",
        packages={"executorch": "executorch"},
        files=("model.pte",),
        stages=("tracing", "lowering for XNNPACK", "writing the program"),
        tested_by="ExecuTorch on a CPU",
    ),
    ExportTarget(
        "litert",
        "program for phones, for LiteRT, with its KV cache as inputs and outputs",
        ("fp32", "int8", "int4"),
        "twostroke.interop.litert:write_litert",
        "twostroke.interop.litert:expect_litert",
        packages={"litert_torch": "litert-torch"},
        files=("model.tflite",),
        stages=("tracing and converting", "rounding"),
        tested_by="LiteRT on a CPU",
    ),
    ExportTarget(
        "coreml",
        "package for Core ML of macOS 15 and iOS 18, with its KV cache as states; written on any system, run on Apple's alone",
        ("fp16", "fp32", "int8", "int4"),
        "twostroke.interop.coreml:write_coreml",
        "twostroke.interop.coreml:expect_coreml",
        packages={"coremltools": "coremltools"},
        files=("model.mlpackage",),
        stages=("tracing", "converting", "rounding", "writing the package"),
        tested_by="an interpreter in the test: Core ML has none for other systems",
    ),
    ExportTarget(
        "gguf",
        "one GGUF file with its tokenizer, for llama.cpp, Ollama and LM Studio",
        tuple(PRECISIONS),
        "twostroke.interop.gguf_export:write_gguf",
        "twostroke.interop.gguf_export:expect_gguf",
        suffix=".gguf",
        tested_by="llama.cpp",
        weighed=WEIGHED,
    ),
)

TARGETS: dict[str, ExportTarget] = {row.name: row for row in _ROWS}


def target_of(name: str) -> ExportTarget:
    """The row of ``name``. Raises ConfigError, listing the known ones."""
    if name not in TARGETS:
        raise ConfigError(f"to={name!r} is not a format to export to. Use {', '.join(TARGETS)}.")
    return TARGETS[name]
