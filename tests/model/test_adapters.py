from __future__ import annotations

from pathlib import Path

import pytest
import torch

from small_models import SPECS, decoder_of, saved
from twostroke.core.errors import ConfigError, CorruptFileError, InputError
from twostroke.model.adapter_directory import WEIGHTS_NAME, base_directory, fingerprint, save_adapters
from twostroke.model.adapters import (
    AdapterSettings,
    LowRankExperts,
    Nf4Experts,
    Target,
    all_targets,
    attach_adapters,
    choose_targets,
    nf4_round_trip,
    peft_names,
)
from twostroke.model.decoder import Decoder
from twostroke.model.load import load_model

TOKENS = torch.randint(2, 97, (2, 24), generator=torch.Generator().manual_seed(5))
FAMILIES = sorted(SPECS)


def adapted(name: str, *targets: str, rank: int = 3, alpha: float = 6.0, dropout: float = 0.0) -> Decoder:
    """A decoder with adapters whose B is not 0."""
    decoder = decoder_of(name)
    attach_adapters(decoder, decoder.spec, AdapterSettings(rank, alpha, targets, dropout), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, parameter in decoder.named_parameters():
            if parameter_name.endswith(".b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder.eval()


def saved_adapters(decoder: Decoder, settings: AdapterSettings, base: Path, directory: Path) -> Path:
    names = peft_names(choose_targets(decoder.spec, settings.targets))
    weights = {names[name]: p.detach() for name, p in decoder.named_parameters() if p.requires_grad}
    return save_adapters(weights, decoder.spec, settings, base, directory, base)


@pytest.mark.parametrize("name", FAMILIES)
def test_fresh_adapters_change_nothing_and_leave_nothing_else_to_train(name: str) -> None:
    plain, decoder = decoder_of(name), decoder_of(name)
    attach_adapters(decoder, decoder.spec, AdapterSettings(3, 6.0, ("all-linear",)), seed=1)
    assert torch.equal(decoder(TOKENS), plain(TOKENS))
    trained = {n for n, p in decoder.named_parameters() if p.requires_grad}
    assert trained == set(peft_names(choose_targets(decoder.spec, ("all-linear",))))
    assert all(".adapters." in n for n in trained)


@pytest.mark.parametrize(("target", "rows"), [("q_proj", slice(0, 48)), ("k_proj", slice(48, 64)), ("v_proj", slice(64, 80))])
def test_an_adapter_touches_its_own_rows_of_a_packed_product_and_no_others(target: str, rows: slice) -> None:
    plain, decoder = decoder_of("llama"), adapted("llama", target)
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(3))
    before = plain.get_submodule("blocks.1.attn.qkv")(x)
    after = decoder.get_submodule("blocks.1.attn.qkv")(x)
    touched = torch.zeros(80, dtype=torch.bool)
    touched[rows] = True
    assert torch.equal(after[..., ~touched], before[..., ~touched])
    assert ((after - before)[..., touched] != 0).all()
    layer = decoder.get_submodule(f"blocks.1.attn.qkv.adapters.{target}")
    wanted = before[..., rows] + (x @ layer.a.T @ layer.b.T) * (6.0 / 3)
    torch.testing.assert_close(after[..., rows], wanted)  # sums of 48 products in another order


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_when_loaded_it_computes_the_same(name: str, tmp_path: Path) -> None:
    _, base = saved(name, tmp_path / "base")
    decoder = adapted(name, "all-linear")
    directory = saved_adapters(decoder, AdapterSettings(3, 6.0, ("all-linear",)), base, tmp_path / "adapters")
    with torch.no_grad():
        merged, unmerged, plain = (d(TOKENS) for d in (load_model(directory), decoder, decoder_of(name)))
    assert (merged - unmerged).abs().max() <= 1e-4 * unmerged.abs().max()  # fp32, products summed in another order
    assert (plain - unmerged).abs().max() > 0.01 * unmerged.abs().max()


def test_dropout_drops_in_training_only_and_only_before_the_adapter() -> None:
    torch.manual_seed(0)
    decoder = adapted("llama", "down_proj", dropout=0.5)
    layer = decoder.get_submodule("blocks.0.mlp.down")
    x = torch.randn(40, 80)
    kept = layer(x)
    assert torch.equal(layer(x), kept)
    layer.train()
    assert not torch.equal(layer(x), kept)
    base = layer.base(x)
    # E[dropout(x)] = x, so the mean over many draws is the undropped product; 3000 draws leave 1/√3000 of its spread.
    mean = (layer(x.repeat(3000, 1, 1)) - base).mean(0)
    assert (mean - (kept - base)).std() < 0.05 * (kept - base).std()


EXPERT, ENDS = torch.tensor([0, 0, 0, 2, 2, 3]), torch.tensor([3, 3, 5, 6])


def rows_by_hand(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return torch.stack([matrices[expert] @ row for row, expert in zip(x, EXPERT.tolist(), strict=True)])


def test_experts_adapters_are_two_thin_products_an_expert_with_their_gradients() -> None:
    torch.manual_seed(3)
    adapter = LowRankExperts(Target("m", "s", 0, 5, 8, copies=4), 2, 1.5, 0.0, torch.device("cpu"))
    with torch.no_grad():
        adapter.a.normal_()
        adapter.b.normal_()
    x = torch.randn(6, 8, requires_grad=True)
    a, b = (factor.detach().unflatten(0, (4, -1)).requires_grad_() for factor in (adapter.a, adapter.b))
    upstream = torch.randn(6, 5)
    wanted = rows_by_hand(x, 1.5 * b @ a)
    of_x, of_a, of_b = torch.autograd.grad(wanted, (x, a, b), upstream)
    y = adapter(x, ENDS, EXPERT)
    found = torch.autograd.grad(y, (x, adapter.a, adapter.b), upstream)
    torch.testing.assert_close(y, wanted)
    for one, other in zip(found, (of_x, of_a.flatten(0, 1), of_b.flatten(0, 1)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("block", [8, 64])
def test_experts_in_nf4_compute_what_each_of_them_stands_for(double: bool, block: int) -> None:
    """A block of 64 holds more than an expert's 40 weights: none shares one with another."""
    torch.manual_seed(4)
    weight, bias = torch.randn(20, 8) * torch.arange(1, 21)[:, None], torch.nn.Parameter(torch.randn(20))
    experts = Nf4Experts(weight, 4, bias, block, double)
    rounded = torch.stack([nf4_round_trip(one, block, double) for one in weight.unflatten(0, (4, -1))])
    assert torch.equal(nf4_round_trip(weight, block, double, 4), rounded.flatten(0, 1))
    x, upstream = torch.randn(6, 8, requires_grad=True), torch.randn(6, 5)
    wanted = rows_by_hand(x, rounded) + bias.unflatten(0, (4, -1))[EXPERT]
    (of_x,) = torch.autograd.grad(wanted, x, upstream)
    y = experts(x, ENDS, EXPERT)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y, x, upstream)[0], of_x)


class TestTargets:
    def test_names_are_matched_as_peft_matches_them(self) -> None:
        chosen = {t.stored for t in choose_targets(SPECS["gpt2"], ("mlp.c_proj", "c_attn"))}
        assert chosen == {f"transformer.h.{i}.{n}" for i in range(3) for n in ("mlp.c_proj", "attn.c_attn")}
        one = choose_targets(SPECS["llama"], ("model.layers.2.self_attn.v_proj",))
        assert [(t.module, t.begin, t.rows) for t in one] == [("blocks.2.attn.qkv", 64, 16)]

    @pytest.mark.parametrize("name", FAMILIES)
    def test_all_linear_is_every_matrix_of_the_blocks(self, name: str) -> None:
        decoder = decoder_of(name)
        in_targets = sum(t.rows * t.columns for t in all_targets(decoder.spec))
        in_blocks = sum(p.numel() for n, p in decoder.named_parameters() if n.startswith("blocks.") and p.dim() == 2)
        assert in_targets == in_blocks

    @pytest.mark.parametrize(("wrong", "hint"), [("qproj", "Did you mean 'q_proj'"), ("zzz", "Known: all-linear, down_proj")])
    def test_an_unknown_one_is_named_with_the_nearest(self, wrong: str, hint: str) -> None:
        with pytest.raises(ConfigError, match=f"a llama model has no matrix '{wrong}'. {hint}"):
            choose_targets(SPECS["llama"], ("q_proj", wrong))


class TestDirectories:
    def make(self, tmp_path: Path) -> tuple[Path, Path]:
        _, base = saved("llama", tmp_path / "base")
        return base, saved_adapters(adapted("llama", "q_proj"), AdapterSettings(3, 6.0, ("q_proj",)), base, tmp_path / "a")

    def test_a_base_that_changed_is_refused(self, tmp_path: Path) -> None:
        base, directory = self.make(tmp_path)
        before = fingerprint(base)
        content = bytearray((base / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (base / "model.safetensors").write_bytes(content)
        assert fingerprint(base) != before
        with pytest.raises(CorruptFileError, match="have changed since the adapters"):
            load_model(directory)

    def test_a_base_that_is_gone_is_named(self, tmp_path: Path) -> None:
        base, directory = self.make(tmp_path)
        base.rename(tmp_path / "elsewhere")
        with pytest.raises(InputError, match=r"holds adapters of .*base, which is not a model directory on this machine"):
            load_model(directory)
        (tmp_path / "elsewhere").rename(base)
        assert base_directory(directory) == base.resolve()

    def test_adapters_of_another_model_are_refused(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        _, directory = self.make(tmp_path)
        tensors = load_file(directory / WEIGHTS_NAME)
        first = next(iter(tensors))
        for changed, sentence in (
            (tensors | {first: torch.zeros(3, 47)}, r"has shape \[3, 47\]; this base needs \[3, 48\]"),
            ({k: v for k, v in tensors.items() if k != first}, "is missing"),
            (tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(3, 48)}, "fits no matrix"),
        ):
            save_file(changed, directory / WEIGHTS_NAME)
            with pytest.raises(CorruptFileError, match=sentence):
                load_model(directory)
