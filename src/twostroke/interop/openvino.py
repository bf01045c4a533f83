"""Writes OpenVINO's intermediate representation: the graph of ``interop.onnx``, converted by the openvino package.

Inputs and outputs are those of the ONNX graph, the KV cache among them. Codes stay codes: OpenVINO reads ``MatMulNBits`` as
compressed constants (its ONNX frontend, ``com.microsoft`` operations).
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

from twostroke.core.aside import require_space
from twostroke.interop.export_targets import ExportSource
from twostroke.interop.moved import Held, Made
from twostroke.interop.onnx import DATA, GRAPH, expect_graph, write_graph

MODEL = "openvino_model.xml"


def write_openvino(source: ExportSource, out: Path, precision: str) -> tuple[str, ...]:
    """Fill ``out`` with the model, its weights and the tokenizer's files. fp16: weights are stored so, the graph stays fp32.

    Needs the model in ``precision`` twice on the disk for a while, and raises OSError where it is full.
    """
    import openvino

    notes = write_graph(source, out, "fp32" if precision == "fp16" else precision)
    model = openvino.Core().read_model(out / GRAPH)
    n_bytes = (out / DATA).stat().st_size
    require_space(out, n_bytes // 2 if precision == "fp16" else n_bytes)
    try:
        openvino.save_model(model, out / MODEL, compress_to_fp16=precision == "fp16")
    except RuntimeError as error:  # whatever the system said is lost in it
        raise OSError(errno.EIO, f"OpenVINO could not write the model ({error})", str(out.parent)) from error
    for name in (GRAPH, DATA):
        (out / name).unlink()
    return notes


def expect_openvino(source: ExportSource, held: Held, precision: str) -> Made:
    """What ``write_openvino`` will write, nearly: the weights of the graph. Beside it lies that graph for a while."""
    graph = expect_graph(source, "fp32" if precision == "fp16" else precision)
    return replace(graph, n_bytes=graph.n_bytes / 2 if precision == "fp16" else graph.n_bytes)
