"""The diffusion transformer: recorded values of the published one, its sizes, what each input does, what it refuses."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from src.flow import guided
from src.modules.networks.dit import PLAIN_TOKENS, SIZES, Block, DiT, attend, grid_positions
from src.modules.networks.reference_names import dit_state, published_dit

GOLDEN = Path(__file__).parent / "golden" / "dit_tiny.pt"
TINY = dict(channels=3, resolution=8, patch=2, width=16, depth=2, heads=2)


@pytest.fixture(scope="module")
def golden():
    """The recorded values with our network carrying the recorded weights."""
    case = SimpleNamespace(**torch.load(GOLDEN, weights_only=True))
    case.network = build(case.config)
    case.network.load_state_dict(dit_state(case.state, case.network))
    return case


def build(c, **options):
    sizes = dict(
        channels=c["in_channels"],
        resolution=c["input_size"],
        patch=c["patch_size"],
        width=c["hidden_size"],
        depth=c["depth"],
        heads=c["num_heads"],
        classes=c["num_classes"],
        learn_sigma=c["learn_sigma"],
    )
    return DiT(**(sizes | options))


def tiny(**options):
    """A small network in float64 whose every weight matters: the initialisation makes many of them zero."""
    network = DiT(**(TINY | options)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        parameter.data.normal_(0, fan_in**-0.5, generator=generator)
    return network


def inputs(n=2):
    """A noisy image and times of which none is whole."""
    x = torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x, torch.arange(n) * 400 + 0.25


# The published network


@torch.no_grad()
def test_the_output_is_the_published_networks(golden):
    i = golden.inputs
    torch.testing.assert_close(golden.network(i["x"], i["t"], i["y"]), golden.expected["output"], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_guidance_is_the_published_one(golden):
    """Recorded for one image at t = 17 under label 3, with the same image under the null class beside it."""
    x, t, labels = golden.inputs["x"][:1], golden.inputs["t"][1:2], golden.inputs["y"][1:]
    assert labels.tolist() == [3, golden.network.classes]
    conditional, unconditional = golden.network(x.repeat(2, 1, 1, 1), t.repeat(2), labels).split(1)
    scale, (first, second) = golden.expected["cfg_scale"], golden.expected["cfg_output"].split(1)
    found = guided(conditional, unconditional, scale, channels=3)
    torch.testing.assert_close(found, first, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[:, :3], second[:, :3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unconditional[:, 3:], second[:, 3:], rtol=1e-5, atol=1e-5)


def test_positions_are_the_published_ones(golden):
    torch.testing.assert_close(grid_positions(48, 4, 4), golden.state["pos_embed"][0], rtol=0, atol=1e-6)
    two = grid_positions(8, 2, 3).unflatten(0, (2, 3))  # features of the column, then of the row
    for row in range(2):
        for column in range(3):
            angles = torch.tensor([[column, column / 100], [row, row / 100]])
            torch.testing.assert_close(two[row, column], torch.cat([angles.sin(), angles.cos()], 1).flatten())


@pytest.mark.parametrize(("size", "millions"), [("S/2", 33), ("B/2", 130), ("L/2", 458), ("XL/2", 675)])
def test_published_sizes(size, millions):
    """On latents of ImageNet at 256 pixels; fixed positions are no parameters."""
    with torch.device("meta"):
        network = DiT(4, 32, size=size, classes=1000, learn_sigma=True)
    assert round(parameters(network) / 1e6) == millions and network.patch == int(size[-1])
    assert list(network.state_dict()) == [name for name, _ in network.named_parameters()]


def parameters(network):
    return sum(p.numel() for p in network.parameters())


def test_small_sizes_and_what_is_given_beside_one():
    assert round(parameters(DiT(1, 28, size="mini/4")) / 1e6, 1) == 1.9
    assert [round(parameters(DiT(3, 32, size="Ti/4", modulation=m)) / 1e6, 1) for m in ("zero", "single")] == [4.2, 3.1]
    network = DiT(1, 8, width=16, heads=2, size="mini/8")
    assert (network.patch, network.heads, len(network.blocks)) == (8, 2, SIZES["mini"][1])
    assert network.stem.out_channels == 16


@pytest.mark.parametrize("size", ["M/2", "XL", "XL/", "XL/a", "4"])
def test_unknown_sizes_are_refused(size):
    with pytest.raises(ValueError, match=f"size {size} does not exist; choose mini, Ti, S, B, L, XL and a patch"):
        DiT(1, 8, size=size)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_published_names_are_translated_one_to_one(golden, prefix):
    state = dit_state({f"{prefix}{k}": v for k, v in golden.state.items()}, golden.network)
    assert state.keys() == golden.network.state_dict().keys() and len(state) == len(golden.state) - 1
    assert len({value.data_ptr() for value in state.values()}) == len(state)
    assert state["blocks.1.modulation.weight"] is golden.state["blocks.1.adaLN_modulation.1.weight"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(depth=3), r"does not fit DiT \(10 differences\): blocks\.2\.adaLN_modulation\.1\.weight is missing"),
        (dict(classes=9), "embedding_table.weight has shape .11, 48. where .10, 48. is wanted"),
        (dict(resolution=16), "has 16 positions, which are not the 64 of DiT"),
        (dict(learn_sigma=False), r"final_layer\.linear\.weight has shape"),
    ],
)
def test_checkpoints_of_another_architecture_are_refused(golden, options, said):
    with pytest.raises(ValueError, match=said):
        dit_state(golden.state, build(golden.config, **options))


def test_other_positions_of_the_same_shape_are_refused(golden):
    with pytest.raises(ValueError, match="positions"):
        dit_state(golden.state | {"pos_embed": golden.state["pos_embed"] + 0.1}, golden.network)


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_published_files_load_by_path(golden, tmp_path, training):
    """One of the weights alone, or one of the training script, whose averages count."""
    other = {key: torch.zeros_like(value) for key, value in golden.state.items()}
    content = {"model": other, "ema": golden.state, "args": argparse.Namespace(lr=1e-4)} if training else golden.state
    torch.save(content, tmp_path / "DiT.pt")
    network = build(golden.config)
    network.load_state_dict(published_dit(str(tmp_path / "DiT.pt"), network))
    i = golden.inputs
    torch.testing.assert_close(network(i["x"], i["t"], i["y"]), golden.expected["output"], rtol=1e-5, atol=1e-5)


def test_files_that_are_none_are_refused(golden, tmp_path):
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save([1], tmp_path / "list.pt")
    for name, said in [("text.pt", "cannot be read as a published DiT"), ("list.pt", "holds a list, not a published")]:
        with pytest.raises(ValueError, match=f"{name} {said}"):
            published_dit(str(tmp_path / name), golden.network)


# The network


def test_starts_at_zero_with_blocks_that_do_nothing():
    network, (x, t) = DiT(**TINY), inputs()
    assert torch.equal(network(x.float(), t), torch.zeros(2, 3, 8, 8))
    h = torch.randn(2, 16, 16)
    assert torch.equal(network.blocks[0](h, torch.randn(2, 16)), h)
    (2 * network(x.float(), t) - 1).square().mean().backward()
    assert network.head.weight.grad.isfinite().all() and network.head.bias.grad.abs().min() > 0  # and yet it learns


@torch.no_grad()
def test_every_input_matters_and_samples_are_independent():
    network, (x, t) = tiny(), inputs()
    image = network(x, t)
    assert image.shape == x.shape and image.dtype == torch.float64 and image.isfinite().all()
    for changed in [network(x + 0.1, t), network(x, t + 1)]:
        assert (changed - image).abs().mean() > 1e-4
    torch.testing.assert_close(network(x[1:], t[1:]), image[1:], rtol=1e-10, atol=1e-12)
    assert tiny(learn_sigma=True)(x, t).shape == (2, 6, 8, 8)
    assert network.shape == (3, 8, 8)


@torch.no_grad()
def test_a_block_is_the_formula():
    block = tiny().blocks[0]
    generator = torch.Generator().manual_seed(3)
    x, c = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in [(2, 5, 16), (2, 16)])
    a = {name: p for name, p in block.named_parameters()}

    def layer(name, h):
        return h @ a[f"{name}.weight"].T + a[f"{name}.bias"]

    def norm(h, shift, scale):
        h = (h - h.mean(2, keepdim=True)) / (h.var(2, keepdim=True, correction=0) + 1e-6).sqrt()
        return h * (1 + scale) + shift

    s = layer("modulation", c)[:, None].split(16, dim=2)  # shift, scale, gate of attention, then of the MLP
    q, k, v = layer("attention.qkv", norm(x, s[0], s[1])).split(16, dim=2)
    heads = []
    for part in (slice(0, 8), slice(8, 16)):
        weights = (q[..., part] @ k[..., part].mT / 8**0.5).softmax(2)
        heads.append(weights @ v[..., part])
    h = x + s[2] * layer("attention.out", torch.cat(heads, 2))
    inner = layer("mlp.fc1", norm(h, s[3], s[4]))
    inner = inner / 2 * (1 + ((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)).tanh())
    torch.testing.assert_close(block(x, c), h + s[5] * layer("mlp.fc2", inner), rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_one_modulation_of_all_blocks_and_offsets_are_modulations_with_the_same_weights():
    """adaLN-single is adaLN-Zero whose layers share their weight, and differ in their biases alone."""
    single, zero, (x, t) = tiny(modulation="single", classes=3), tiny(classes=3), inputs()
    state = single.state_dict()
    weight, bias = state.pop("modulation.weight"), state.pop("modulation.bias")
    for n in range(len(single.blocks)):
        state[f"blocks.{n}.modulation.weight"] = weight
        state[f"blocks.{n}.modulation.bias"] = bias + state.pop(f"blocks.{n}.offset")
    zero.load_state_dict(state)
    labels = torch.tensor([2, 3])
    torch.testing.assert_close(single(x, t, labels), zero(x, t, labels), rtol=1e-10, atol=1e-12)
    assert (single.blocks[0].offset - single.blocks[1].offset).abs().min() > 0

    fresh, h = DiT(**TINY, modulation="single"), torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fresh.blocks[1](h, fresh.modulation(h[:, 0])), h)  # it starts as the identity as well
    with pytest.raises(ValueError, match="modulation=double does not exist; choose zero or single"):
        tiny(modulation="double")


def test_modulations_start_to_learn():
    network, (x, t) = DiT(**TINY, modulation="single"), inputs()
    torch.nn.init.ones_(network.head.weight)
    (2 * network(x.float(), t) - 1).square().mean().backward()
    for parameter in (network.modulation.weight, network.blocks[0].offset, network.blocks[1].offset):
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("modulation", ["zero", "single"])
def test_checkpointing_gives_the_same_gradients_from_less(modulation, bf16):
    found = []
    for checkpointing in (False, True):
        network, (x, t) = tiny(depth=3, modulation=modulation, checkpointing=checkpointing).float(), inputs(4)
        kept = []
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
            torch.autograd.graph.saved_tensors_hooks(lambda v, k=kept: k.append(v.numel()) or v, lambda v: v),
        ):
            loss = network(x.float(), t).square().mean()
        loss.backward()
        found.append((loss.detach(), [p.grad for p in network.parameters()], sum(kept)))
    (loss, gradients, all_kept), (again, recomputed, few_kept) = found
    assert torch.equal(loss, again)
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed, strict=True))
    assert all(g.abs().max() > 0 for g in gradients) and few_kept < all_kept / 3


@pytest.mark.parametrize(
    ("dtype", "tokens", "fused"),
    [(torch.bfloat16, 49, False), (torch.bfloat16, PLAIN_TOKENS + 1, True), (torch.float32, 49, True)],
)
def test_attention_is_the_formula_computed_as_is_fastest(monkeypatch, dtype, tokens, fused):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    expected = ((q @ k.mT / 8**0.5).softmax(3) @ v).to(dtype)
    calls, original = [], nn.functional.scaled_dot_product_attention
    told = lambda *a: calls.append(1) or original(*a)  # noqa: E731
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", told)
    near = dict(rtol=0, atol=0.02) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(attend(q.to(dtype), k.to(dtype), v.to(dtype)), expected, **near)
    assert bool(calls) == fused


@torch.no_grad()
@pytest.mark.parametrize("patch", [2, 4, 8])
def test_patches_come_back_where_they_were(patch):
    """Without blocks, and with a head that undoes the stem, the output is the normed patch at its own place."""
    network = DiT(1, 8, patch, width=patch**2, depth=0, heads=1)
    network.positions.zero_()
    network.stem.weight.copy_(torch.eye(patch**2).view_as(network.stem.weight))
    network.head.weight.copy_(torch.eye(patch**2))
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    tiles = nn.functional.unfold(x, patch, stride=patch)  # (n, pixels, l)
    tiles = nn.functional.layer_norm(tiles.mT, (patch**2,), eps=1e-6).mT
    expected = nn.functional.fold(tiles, (8, 8), patch, stride=patch)
    torch.testing.assert_close(network(x, torch.zeros(2)), expected)


@torch.no_grad()
def test_labels_are_optional_and_their_last_row_is_the_null_class():
    network, (x, t) = tiny(classes=3), inputs()
    assert network.label_embedding.num_embeddings == 4
    images = [network(x, t, torch.full((2,), label)) for label in range(4)]
    assert min((a - b).abs().mean() for i, a in enumerate(images) for b in images[:i]) > 1e-3
    with pytest.raises(ValueError, match="pass labels"):
        network(x, t)

    plain = tiny()
    assert set(network.state_dict()) - set(plain.state_dict()) == {"label_embedding.weight"}
    assert torch.equal(plain(x, t, torch.tensor([0, 1])), plain(x, t))
    network.load_state_dict(plain.state_dict(), strict=False)
    network.label_embedding.weight.zero_()  # it is added to the embedding of the time
    assert torch.equal(network(x, t, torch.tensor([0, 3])), plain(x, t))


@torch.no_grad()
def test_shard_units_run_once_each_and_in_order():
    network, ran = tiny(depth=3), []
    for module in network.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda module, *_: ran.append(module))
    network(*inputs())
    assert [id(unit) for unit in network.shard_units()] == [id(module) for module in ran]
    assert network.forward_methods == ()


def test_forward_draws_no_random_numbers():
    network, before = tiny(), torch.get_rng_state()
    network(*inputs())
    assert torch.equal(before, torch.get_rng_state())


def test_bf16_keeps_times_apart_and_the_output_in_float32():
    network, x = tiny().float(), inputs()[0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        images = [network(x, torch.full((2,), t)) for t in (998.0, 999.0)]  # the same number in bfloat16
    assert images[0].dtype == torch.float32 and not torch.equal(*images)


def test_compiles_without_graph_breaks():
    network = tiny()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs()), network(*inputs()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (dict(patch=3), "patches of 3 pixels do not divide an image of 8: change"),
        (dict(patch=0), "patches of 0 pixels"),
        (dict(heads=3), "width of 16 with 3 heads is impossible: choose"),
        (dict(width=18), "width of 18 with 2 heads is impossible: choose a width that 4"),
        (dict(classes=-1), "0 for a network without labels"),
    ],
)
def test_impossible_sizes(options, fix):
    with pytest.raises(ValueError, match=fix):
        DiT(**(TINY | options))


def test_processes_that_cannot_share_the_heads_or_the_mlp_are_told():
    network = tiny()
    assert network.tensor_plan(2)["blocks.1.attention.qkv"] == "qkv"
    for parts, options, said in [
        (4, {}, "4 processes cannot share the network's heads, 2, equally: change strategy.tensor or model"),
        (2, {"mlp_ratio": 0.9375}, "2 processes cannot share the network's MLP width, 15, equally"),
    ]:
        with pytest.raises(ValueError, match=said):
            tiny(**options).tensor_plan(parts)
