"""Which GGUF type each matrix of a file gets, by the names that llama.cpp gives to such mixes. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Choice = Callable[["Place"], str]


@dataclass(frozen=True)
class Place:
    """A matrix of a file: its name without layer and ``.weight``, the layer (None: none), of how many, and the model."""

    name: str
    layer: int | None
    n_layers: int
    is_head: bool
    architecture: str
    n_experts: int


def _more_bits(place: Place) -> bool:
    """The layers whose matrices llama.cpp's medium mixes give more bits (``use_more_bits`` in its ``llama-quant.cpp``): the
    first and the last eighth, and every third between."""
    assert place.layer is not None
    eighth = place.n_layers // 8
    return place.layer < eighth or place.layer >= 7 * place.n_layers // 8 or (place.layer - eighth) % 3 == 2


def _one(usual: str) -> Choice:
    """One type everywhere."""
    return lambda place: usual


def _quantised(usual: str, inside: Choice | None = None) -> Choice:
    """The head in Q6_K, Falcon's, whose rows are no whole K blocks, in Q8_0; of eight experts' models, where they are small
    beside the rest, keys and values in Q8_0; all else ``usual``, or as ``inside`` says of a layer's matrices."""

    def choose(place: Place) -> str:
        if place.is_head:
            return "Q8_0" if place.architecture == "falcon" else "Q6_K"
        if place.n_experts == 8 and place.name in ("attn_v", "attn_k"):
            return "Q8_0"
        return usual if inside is None or place.layer is None else inside(place)

    return choose


def _mixed(usual: str, medium: bool) -> Choice:
    """llama.cpp's mixes of K types (``llama_tensor_get_type``): of the medium ones half of the values, or of packed
    projections, and of the MLP's outputs in Q6_K."""

    def inside(place: Place) -> str:
        assert place.layer is not None
        falcon = place.architecture == "falcon"
        if place.n_experts == 8 and place.name == "attn_output" and usual == "Q4_K":
            return "Q5_K"
        if place.name in ("attn_v", "attn_qkv"):
            if medium:
                return "Q6_K" if _more_bits(place) else usual
            return "Q5_K" if usual == "Q4_K" and place.layer < 4 else usual
        if place.name in ("ffn_down", "ffn_down_exps", "ffn_down_shexp"):
            if medium and falcon and usual == "Q4_K":
                early = place.layer < place.n_layers // 16
                return "Q6_K" if early else "Q5_K" if _more_bits(place) else usual
            if medium:
                return "Q6_K" if _more_bits(place) else usual
            return "Q5_K" if usual == "Q4_K" and place.layer < place.n_layers // 8 and not falcon else usual
        return usual

    return _quantised(usual, inside)


@dataclass(frozen=True)
class Precision:
    """A row: the name that a person gives, llama.cpp's number of such files, and the type of each matrix."""

    name: str
    number: int
    choose: Choice = field(repr=False)


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("F16", 1, _one("F16")),
        Precision("F32", 0, _one("F32")),
        Precision("BF16", 32, _one("BF16")),
        Precision("Q8_0", 7, _one("Q8_0")),
        Precision("Q4_0", 2, _quantised("Q4_0")),
        Precision("Q5_0", 8, _quantised("Q5_0")),
        Precision("Q4_K_S", 14, _mixed("Q4_K", False)),
        Precision("Q4_K_M", 15, _mixed("Q4_K", True)),
        Precision("Q5_K_S", 16, _mixed("Q5_K", False)),
        Precision("Q5_K_M", 17, _mixed("Q5_K", True)),
        Precision("Q6_K", 18, _quantised("Q6_K")),
    )
}
"""What ``--precision`` may be, the default first."""

WEIGHED = tuple(name for name in PRECISIONS if "_K" in name or name in ("Q4_0", "Q5_0"))
"""Those whose scales are searched for: a text can say which errors matter."""

INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What stands for a K type where a row is no whole number of its blocks of 256, as in llama.cpp."""

PLAIN = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd")
"""Matrices that stay in F32: routers and positions."""
