"""A decoder that is read piece by piece computes the bits of one that is in memory, and holds no more than a piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import EVERY, saved
from twostroke.data.packing import document_layout
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model
from twostroke.model.streamed import Input, StreamedDecoder, stream_model


def inputs_of(vocab_size: int) -> list[Input]:
    """Texts of other lengths, one of them packed documents."""
    found: list[Input] = []
    for seed, shape in enumerate(((2, 20), (1, 33), (3, 7))):
        tokens = torch.randint(2, vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        if seed == 0:
            tokens[:, 11] = 1
            positions, documents = document_layout(tokens.numpy(), 1)
            found.append((tokens, torch.from_numpy(positions), torch.from_numpy(documents)))
        else:
            found.append((tokens, torch.arange(shape[1])[None], None))
    return found


def bytes_in_memory(decoder: Decoder) -> int:
    tensors = [*decoder.parameters(), *decoder.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type != "meta")


@pytest.mark.parametrize("name", sorted(EVERY))
@torch.no_grad()
def test_pieces_compute_the_bits_of_the_whole(name: str, tmp_path: Path) -> None:
    _, directory = saved(name, tmp_path / "model")
    whole, streamed = load_model(directory), stream_model(directory)
    inputs = inputs_of(whole.spec.vocab_size)
    for each, hidden in zip(inputs, streamed.hidden_of_each(inputs), strict=True):
        wanted = whole.hidden(*each)
        assert torch.equal(hidden, wanted)
        assert torch.equal(streamed.logits(hidden), whole.logits(wanted))
    assert torch.equal(streamed(*inputs[0]), whole(*inputs[0]))


@torch.no_grad()
def test_no_more_than_a_piece_is_in_memory_and_each_is_read_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = saved("llama", tmp_path / "model")
    streamed = stream_model(directory, "bf16")
    kept = bytes_in_memory(streamed)
    read: list[str] = []
    most: list[int] = []
    fill = StreamedDecoder._fill

    def counted(self: StreamedDecoder, name: str) -> None:
        read.append(name)
        fill(self, name)
        most.append(bytes_in_memory(self))

    monkeypatch.setattr(StreamedDecoder, "_fill", counted)
    for hidden in streamed.hidden_of_each(inputs_of(streamed.spec.vocab_size)):
        streamed.logits(hidden)
    assert read == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert max(most) == kept + streamed.piece_bytes
    assert streamed.piece_bytes < streamed.total_bytes / 2
    assert streamed.total_bytes == sum(p.numel() * 2 for p in load_model(directory).parameters())


def test_what_is_read_inside_of_inference_mode_can_be_used_outside_of_it(tmp_path: Path) -> None:
    _, directory = saved("qwen3", tmp_path / "model")
    streamed = stream_model(directory)
    tokens = torch.arange(6)[None]
    with torch.inference_mode():
        inside = streamed(tokens)
    with torch.no_grad():
        assert torch.equal(streamed(tokens), inside)
