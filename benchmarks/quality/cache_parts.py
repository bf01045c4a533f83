"""What each part of a cache in 4 bits costs: keys, values, their form and bits, newest tokens, each layer. See README.md."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import recorded
from run import windows_of

from twostroke.engine.key_offset import N_TOKENS
from twostroke.kernels.four_bit_cache import hadamard, key_codes, keys_of, value_codes, values_of
from twostroke.model.attention import Attention
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model

PAGE = 16

Held = Callable[[Tensor], Tensor]
"""What a cache gives back of keys or values, (B, K, T, D)."""


def exact(x: Tensor) -> Tensor:
    return x


def ranged(x: Tensor, bits: int = 4) -> Tensor:
    """A scale and a middle in bf16 for the last dimension, in 4 bits as ``key_codes`` has them."""
    high, low = x.amax(dim=-1, keepdim=True), x.amin(dim=-1, keepdim=True)
    most = 2**bits - 1
    scale, middle = (high / most - low / most).bfloat16().float(), (0.5 * high + 0.5 * low).bfloat16().float()
    codes = ((x - middle) * scale.clamp_min(1e-30).reciprocal() + most / 2).round().clamp(0, most)
    return (codes - most / 2) * scale + middle


def keys_now(k: Tensor) -> Tensor:
    return hadamard(keys_of(*key_codes(hadamard(k))))


def values_now(v: Tensor) -> Tensor:
    return hadamard(values_of(*value_codes(hadamard(v))))


def transformed(held: Held, x: Tensor) -> Tensor:
    return hadamard(held(hadamard(x)))


def in_halves(held: Held, x: Tensor) -> Tensor:
    """A range for each half of a head."""
    return held(x.unflatten(-1, (2, -1))).flatten(-2)


def by_channel(x: Tensor) -> Tensor:
    """A range for each channel of a page (KIVI, arXiv 2402.02750)."""
    n = x.shape[-2]
    pages = torch.nn.functional.pad(x, (0, 0, 0, -n % PAGE), mode="replicate").unflatten(-2, (-1, PAGE))
    return ranged(pages.transpose(-1, -2)).transpose(-1, -2).flatten(-3, -2)[..., :n, :]


def with_first(n: int, held: Held, x: Tensor) -> Tensor:
    """The first ``n`` tokens as they are: others attend to them for want of anything better."""
    return torch.cat((x[..., :n, :], held(x[..., n:, :])), dim=-2)


@dataclass(frozen=True)
class Form:
    """``newest`` tokens, or with −1 those of a query's own page, are as they were computed. ``layer``: others are exact."""

    name: str
    keys: Held = exact
    values: Held = exact
    centred: bool = True
    newest: int = 0
    layer: int | None = None


FORMS = (
    Form("keys and values, as the engine's int4 cache", keys_now, values_now),
    Form("keys alone", keys_now),
    Form("values alone", values=values_now),
    Form("keys, not centred", keys_now, centred=False),
    Form("keys, not transformed", ranged),
    Form("keys, a scale alone", partial(transformed, lambda x: values_of(*value_codes(x)))),
    Form("keys, a range for each half", partial(transformed, partial(in_halves, ranged))),
    Form("keys in 5 bits", partial(transformed, partial(ranged, bits=5))),
    Form("keys in 6 bits", partial(transformed, partial(ranged, bits=6))),
    Form("keys in 8 bits", partial(transformed, partial(ranged, bits=8))),
    Form("keys, a range for each channel of a page", by_channel, newest=-1),
    Form("the same, transformed", partial(transformed, by_channel), newest=-1),
    Form("keys, their page exact", keys_now, newest=-1),
    Form("keys, the newest 32 exact", keys_now, newest=32),
    Form("keys, the newest 128 exact", keys_now, newest=128),
    Form("keys, the first 4 exact", partial(with_first, 4, keys_now)),
    Form("values with a range", values=partial(transformed, ranged)),
    Form("keys in 8 bits, values as now", partial(transformed, partial(ranged, bits=8)), values_now),
    Form("keys and values, the newest 128 exact", keys_now, values_now, newest=128),
)


def _is_near(n_tokens: int, newest: int) -> Tensor:
    """(T, S): whether query t reads key s as it was computed."""
    index = torch.arange(n_tokens)
    if newest < 0:
        return index[:, None] // PAGE == index[None] // PAGE
    return index[:, None] - index[None] < newest


class Attending:
    """Attention over keys and values as a cache of ``form`` holds them."""

    def __init__(self, decoder: Decoder, form: Form, offsets: list[Tensor]) -> None:
        self._layers = {id(block.attn): i for i, block in enumerate(decoder.blocks)}
        self._form, self._offsets = form, offsets

    def __call__(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        layer, form, n = self._layers[id(attention)], self._form, q.shape[-2]
        k_held, v_held = k, v
        if form.layer in (None, layer):
            offset = self._offsets[layer] if form.centred else torch.zeros(())
            k_held, v_held = form.keys(k - offset) + offset, form.values(v)
        k, v, k_held, v_held = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, k_held, v_held))
        near = _is_near(n, form.newest)
        scores = torch.where(near, q @ k.transpose(-1, -2), q @ k_held.transpose(-1, -2)) * attention.scale
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        shares = torch.softmax(scores, dim=-1)
        return shares @ v_held + (shares * near) @ (v - v_held)


@contextmanager
def attending(decoder: Decoder, attend: Callable[..., Tensor]) -> Iterator[None]:
    before = Attention.attend
    Attention.attend = lambda self, *arguments: attend(self, *arguments)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Attention.attend = before  # type: ignore[method-assign]


def offsets_of(decoder: Decoder) -> list[Tensor]:
    """Each layer's mean keys over random tokens, as ``engine.key_offset`` has them: (K, 1, D)."""
    found: list[Tensor] = []
    plain = Attention.attend

    def seen(attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        found.append(k[0].mean(dim=1, keepdim=True))
        return plain(attention, q, k, v, mask)

    ids = torch.randint(0, decoder.spec.vocab_size, (1, N_TOKENS), generator=torch.Generator().manual_seed(0))
    with attending(decoder, seen):
        decoder(ids)
    return found


def logprobs(decoder: Decoder, ids: Tensor) -> Tensor:
    return torch.log_softmax(decoder(ids[None])[0].float(), dim=-1)


def cost(decoder: Decoder, form: Form, offsets: list[Tensor], windows: list[Tensor], reference: list[Tensor]) -> dict[str, Any]:
    """KL from the exact cache and the ratio of perplexities, over ``windows``."""
    worse, divergences = [], []
    with attending(decoder, Attending(decoder, form, offsets)):
        for ids, plain in zip(windows, reference, strict=True):
            found = logprobs(decoder, ids)
            own, others = (each[:-1].gather(1, ids[1:, None]).mean() for each in (found, plain))
            worse.append(float(others - own))
            divergences.append(float((plain.exp() * (plain - found)).sum(dim=1).mean()))
    mean, error = torch.tensor(worse).mean(), torch.tensor(worse).std() / math.sqrt(len(worse))
    return {
        "form": form.name,
        "kl_nats": sum(divergences) / len(divergences),
        "perplexity_ratio": float(mean.exp()),
        "ratio_low": float((mean - 1.96 * error).exp()),
        "ratio_high": float((mean + 1.96 * error).exp()),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", nargs="*", default=[], help="text to score; default: what the model's run held out")
    parser.add_argument("--name", help="of the model, in the record; default: its folder's")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = args.model / "model" if (args.model / "model" / "config.json").is_file() else args.model
    conditions, decoder = recorded.conditions(), load_model(model)
    probe = torch.randn(4, 64)
    assert torch.equal(ranged(probe), keys_of(*key_codes(probe))), "the cache's own codes are others"
    offsets = offsets_of(decoder)
    windows = [torch.tensor(ids) for ids in windows_of(model, args.data, args.length, args.windows)]
    reference = [logprobs(decoder, ids) for ids in windows]
    rows = []
    layers = [Form(f"keys of layer {i} alone", keys_now, layer=i) for i in range(decoder.spec.n_layers)]
    for form in (*FORMS, *layers):
        rows.append(cost(decoder, form, offsets, windows, reference))
        print(line(rows[-1]), flush=True)
    document = conditions | {
        "model": args.name or args.model.name,
        "head_dim": decoder.spec.head_dim,
        "n_tokens": sum(len(ids) - 1 for ids in windows),
        "rows": rows,
    }
    recorded.write(args.out, {"raw.json": document, "summary.md": table(document)})


def line(row: dict[str, Any]) -> str:
    spread = f"{row['ratio_low']:.4f} to {row['ratio_high']:.4f}"
    return f"| {row['form']} | {row['kl_nats']:.2e} | {row['perplexity_ratio']:.4f} ({spread}) |"


def table(document: dict[str, Any]) -> str:
    head = [
        f"# Parts of a cache in 4 bits: {document['model']}, heads of {document['head_dim']}, *measured*",
        "",
        f"{document['n_tokens']} held-out tokens; products and all else in fp32; {document['machine']}.",
        "",
        "| held otherwise than exact | KL, nats a token | perplexity ratio (95%) |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *map(line, document["rows"])]) + "\n"


if __name__ == "__main__":
    main()
