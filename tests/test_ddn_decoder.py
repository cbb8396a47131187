"""The decoder against a literal one that builds every candidate, and the published networks by their numbers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate

from src.discrete import absolute_error, charbonnier
from src.modules.networks import ddn_decoder
from src.modules.networks.ddn_decoder import Block, DDNDecoder

CHANNELS, SIZE, LAYERS = 3, 8, 6


def decoder(dtype=torch.float64, seed=0, **options):
    """Stages of 2, 4 and 8 pixels with two layers each, whose weights are all of order one: nothing hides in an
    initialisation near zero."""
    given = dict(blocks=[2, 2, 2], widths=[16, 16, 12], leaves=[5, 4, 7], start=2) | options
    generator = torch.Generator().manual_seed(seed)
    network = DDNDecoder(CHANNELS, SIZE, **given).to(dtype)
    for parameter in network.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) / 3
    return network


def images(n=6, dtype=torch.float64):
    return (
        torch.rand(n, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        .to(dtype)
        .mul(2)
        - 1
    )


def random_codes(network, n=6):
    generator = torch.Generator().manual_seed(2)
    return torch.stack([torch.randint(k, (n,), generator=generator) for k in network.leaves], 1)


def doubled(image):
    """Bilinear, centres aligned: each new pixel is 3/4 of the nearest and 1/4 of the next, at the edge the nearest."""
    n = image.shape[-1]
    weights = image.new_zeros(2 * n, n)
    for i in range(2 * n):
        near, far = i // 2, i // 2 + (1 if i % 2 else -1)
        weights[i, near] += 0.75
        weights[i, min(max(far, 0), n - 1)] += 0.25
    return weights @ image @ weights.T


def averaged_down(image, size):
    n = image.shape[-1] // size
    return image.unflatten(3, (size, n)).unflatten(2, (size, n)).mean((3, 5))


def literal(network, target, choose, residual=True, leak=True, labels=None):
    """The method as the paper tells it, one sample at a time and with every candidate built; yields per layer
    (distances (b, k), nearest (b,), image (b, c, h, w), target at that size)."""
    batch = len(target)
    features, image = network.origin.expand(batch, -1, -1, -1), None
    leaked = None
    for layer, (block, head) in enumerate(zip(network.blocks, network.heads, strict=True)):
        features = features.clone()
        if image is not None:
            features[:, :CHANNELS] += image
            if leak:
                features[:, -CHANNELS:] += leaked
        if labels is not None and str(layer) in network.labels:
            features += network.labels[str(layer)].weight[labels][:, :, None, None]
        features = block(features)
        size = features.shape[-1]
        if image is not None and image.shape[-1] != size:
            image = doubled(image)
        drawing = features[:, : features.shape[1] // 2] if leak else features
        candidates = torch.einsum("koc,bchw->bkohw", head.weight, drawing)
        if image is not None and residual:
            candidates = candidates + image[:, None]
        aim = averaged_down(target, size)
        distances = (candidates - aim[:, None]).square().mean((2, 3, 4))
        nearest = distances.argmin(1)
        chosen = choose(layer, nearest)
        image = candidates[torch.arange(batch), chosen]
        if leak:
            leaked = torch.einsum("boc,bchw->bohw", head.weight[chosen], features[:, features.shape[1] // 2 :])
        yield distances, nearest, image, aim


# The training pass


@pytest.mark.parametrize("options", [{}, {"residual": False}, {"leak": False}, {"residual": False, "leak": False}])
def test_every_layer_agrees_with_building_all_candidates(options):
    network, x = decoder(**options), images()
    layers = list(network(x))
    assert len(layers) == LAYERS
    for ours, (distances, nearest, image, aim) in zip(
        layers, literal(network, x, lambda _, n: n, **options), strict=True
    ):
        torch.testing.assert_close(ours.distances, distances, rtol=1e-9, atol=1e-9)
        assert torch.equal(ours.nearest, nearest)
        torch.testing.assert_close(ours.loss, (image - aim).square().mean(), rtol=1e-9, atol=1e-9)


def test_options_change_the_network():
    x = images()
    plain = [layer.loss for layer in decoder()(x)]
    for options in ({"residual": False}, {"leak": False}):
        changed = [layer.loss for layer in decoder(**options)(x)]
        assert not torch.allclose(torch.stack(changed), torch.stack(plain))


def test_heads_draw_from_half_of_the_features_where_the_other_half_leaks():
    assert [tuple(head.weight.shape) for head in decoder().heads][::2] == [(5, 3, 8), (4, 3, 8), (7, 3, 6)]
    assert [tuple(head.weight.shape) for head in decoder(leak=False).heads][::2] == [(5, 3, 16), (4, 3, 16), (7, 3, 12)]


def test_the_loss_is_the_error_of_the_chosen_candidates():
    for layer in decoder()(images()):
        chosen = layer.distances.gather(1, layer.nearest[:, None])
        torch.testing.assert_close(layer.loss, chosen.mean(), rtol=1e-9, atol=1e-9)


def test_chain_dropout_takes_the_random_leaf_where_it_struck_and_the_nearest_elsewhere():
    network, x = decoder(), images()
    random = random_codes(network)
    dropped = torch.rand(6, LAYERS, generator=torch.Generator().manual_seed(3)) < 0.4
    expected = literal(network, x, lambda layer, nearest: torch.where(dropped[:, layer], random[:, layer], nearest))
    taken_over = 0
    for number, (ours, (distances, nearest, image, aim)) in enumerate(
        zip(network(x, dropped=dropped, random=random), expected, strict=True)
    ):
        assert torch.equal(ours.nearest, nearest)  # the counters always get the true choice ...
        torch.testing.assert_close(ours.distances, distances, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.loss, (image - aim).square().mean(), rtol=1e-9, atol=1e-9)  # ... the loss not
        taken_over += int((nearest != random[:, number])[dropped[:, number]].sum())
    assert taken_over > 5


def test_samples_that_were_not_dropped_know_nothing_of_the_others():
    network, x = decoder(), images()
    dropped = torch.zeros(6, LAYERS, dtype=torch.bool)
    dropped[:3] = True
    plain, mixed = list(network(x)), list(network(x, dropped=dropped, random=random_codes(network)))
    for without, with_dropout in zip(plain, mixed, strict=True):
        torch.testing.assert_close(with_dropout.distances[3:], without.distances[3:], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(mixed[-1].distances[:3], plain[-1].distances[:3])


def test_only_chosen_leaves_get_a_gradient():
    network = decoder()
    layers = list(network(images()))
    torch.stack([layer.loss for layer in layers]).mean().backward()
    for head, layer in zip(network.heads, layers, strict=True):
        moved = head.weight.grad.flatten(1).abs().sum(1) > 0
        assert set(moved.nonzero()[:, 0].tolist()) == set(layer.nearest.tolist())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.blocks.parameters())


def test_gradients_are_those_of_the_literal_network():
    network, x = decoder(), images()
    torch.stack([layer.loss for layer in network(x)]).mean().backward()
    ours = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    errors = [(image - aim).square().mean() for _, _, image, aim in literal(network, x, lambda _, n: n)]
    torch.stack(errors).mean().backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-7, atol=1e-10)


def test_choices_are_made_in_full_precision_under_autocast():
    network, x = decoder(torch.float32), images(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layers = list(network(x))
    assert all(layer.distances.dtype == layer.loss.dtype == torch.float32 for layer in layers)
    plain = torch.stack([layer.loss for layer in network(x)])
    torch.testing.assert_close(layers[0].loss, plain[0], rtol=0.1, atol=0)


# Codes


def test_encoding_follows_the_training_pass():
    network, x = decoder(), images()
    codes = network.encode(x)
    assert codes.shape == (6, LAYERS) and codes.dtype == torch.int64
    assert torch.equal(codes, torch.stack([layer.nearest for layer in network(x)], 1))


@pytest.mark.parametrize(
    "options", [{}, {"residual": False, "leak": False}, {"start": 8, "blocks": [6], "widths": [16], "leaves": [5]}]
)
def test_decoding_a_code_gives_the_training_pass_back_layer_by_layer(options):
    network, x = decoder(**options), images()
    codes, flags = network.encode(x), {key: options[key] for key in ("residual", "leak") if key in options}
    walk = literal(network, x, lambda layer, _: codes[:, layer], **flags)
    for depth, (layer, (_, _, image, aim)) in enumerate(zip(network(x), walk, strict=True), 1):
        decoded = network.decode(codes, layers=depth)
        torch.testing.assert_close(decoded, image, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close((decoded - aim).square().mean(), layer.loss, rtol=1e-9, atol=1e-9)
    assert network.decode(codes).shape == x.shape


def test_a_code_of_the_first_layers_is_enough_for_their_image():
    network = decoder()
    codes = random_codes(network)
    for depth in range(1, LAYERS + 1):
        assert torch.equal(network.decode(codes[:, :depth]), network.decode(codes, layers=depth))
        assert network.decode(codes[:, :depth]).shape[2:] == (2 ** -(-depth // 2),) * 2


def test_every_leaf_makes_another_image():
    network = decoder()
    codes = random_codes(network, 1)
    for layer, k in enumerate(network.leaves):
        each = codes.repeat(k, 1)
        each[:, layer] = torch.arange(k)
        assert len(network.decode(each).flatten(1).unique(dim=0)) == k


def test_decoding_does_not_depend_on_the_batch():
    network = decoder(torch.float32)
    codes = random_codes(network)
    whole = network.decode(codes)
    for size in (1, 4):
        parts = torch.cat([network.decode(part) for part in codes.split(size)])
        assert (parts - whole).abs().max() < 1e-5 * whole.abs().max()


def test_decoding_computes_no_distance(monkeypatch):
    network, x = decoder(), images()
    monkeypatch.setattr(ddn_decoder, "distances", lambda *_: pytest.fail("a distance was computed"))
    network.decode(random_codes(network))
    with pytest.raises(pytest.fail.Exception):
        network.encode(x)


def test_encoding_and_decoding_leave_no_graph():
    network = decoder()
    codes = network.encode(images().requires_grad_(True))
    assert not codes.requires_grad and not network.decode(codes).requires_grad


def test_another_distance_chooses_other_leaves_and_the_loss_stays():
    network, x = decoder(distance_fn=absolute_error), images()
    layers = list(network(x))
    features = network.blocks[0](network.origin.expand(6, -1, -1, -1))
    candidates = torch.einsum("koc,bchw->bkohw", network.heads[0].weight, features[:, :8])
    aim = averaged_down(x, 2)
    distances = (candidates - aim[:, None]).abs().mean((2, 3, 4))
    torch.testing.assert_close(layers[0].distances, distances, rtol=1e-9, atol=1e-9)
    assert torch.equal(layers[0].nearest, distances.argmin(1))
    chosen = candidates[torch.arange(6), distances.argmin(1)]
    torch.testing.assert_close(layers[0].loss, (chosen - aim).square().mean(), rtol=1e-9, atol=1e-9)
    assert not torch.equal(network.encode(x), decoder().encode(x))


def test_another_loss_is_taken_of_the_same_choices():
    softness = 0.05
    network, x = decoder(loss_fn=partial(charbonnier, softness=softness)), images()
    walk = literal(network, x, lambda _, n: n)
    for ours, plain, (distances, _, image, aim) in zip(network(x), decoder()(x), walk, strict=True):
        assert torch.equal(ours.nearest, plain.nearest)
        torch.testing.assert_close(ours.distances, distances, rtol=1e-9, atol=1e-9)
        expected = ((image - aim).square() + softness**2).sqrt().mean() - softness
        torch.testing.assert_close(ours.loss, expected, rtol=1e-9, atol=1e-9)
        assert (image - aim).abs().mean() - softness < ours.loss < (image - aim).abs().mean()


# Labels


def test_labels_change_images_and_choices():
    network, x = decoder(classes=4), images()
    codes = random_codes(network)
    one, two = (network.decode(codes, torch.full((6,), label)) for label in (1, 2))
    assert (one - two).abs().amax((1, 2, 3)).min() > 1e-3
    mixed = network.decode(codes, torch.tensor([1, 2, 1, 2, 1, 2]))
    torch.testing.assert_close(mixed[::2], one[::2])
    torch.testing.assert_close(mixed[1::2], two[1::2])
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    walk = literal(network, x, lambda _, n: n, labels=labels)
    for ours, (distances, nearest, _, _) in zip(network(x, labels), walk, strict=True):
        torch.testing.assert_close(ours.distances, distances, rtol=1e-9, atol=1e-9)
        assert torch.equal(ours.nearest, nearest)


def test_labels_come_in_where_a_stage_begins():
    network = decoder(classes=4)
    assert {name: tuple(e.weight.shape) for name, e in network.labels.items()} == {
        "0": (4, 16),
        "2": (4, 16),
        "4": (4, 16),
    }


def test_a_decoder_with_classes_asks_for_labels():
    network = decoder(classes=4)
    for use in (network.encode, lambda x: network.decode(random_codes(network)), lambda x: list(network(x))):
        with pytest.raises(ValueError, match="labels"):
            use(images())


def test_without_classes_there_are_no_embeddings_and_labels_do_nothing():
    network = decoder(classes=0)
    assert len(network.labels) == 0
    assert not any(name.startswith("labels") for name in network.state_dict())
    codes = random_codes(network)
    assert torch.equal(network.decode(codes, torch.arange(6)), network.decode(codes))


# Its parts


@pytest.mark.parametrize(("width_in", "width", "up"), [(8, 8, False), (8, 12, False), (8, 8, True), (16, 8, True)])
def test_a_block_is_two_normalised_convolutions_beside_a_skip(width_in, width, up):
    torch.manual_seed(0)
    block = Block(width_in, width, up).double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, width_in, 4, 4, dtype=torch.float64)
    grown = x.repeat_interleave(2, 2).repeat_interleave(2, 3) if up else x
    y = F.silu(F.group_norm(x, width_in // 4, block.norm_in.weight, block.norm_in.bias, 1e-6))
    y = y.repeat_interleave(2, 2).repeat_interleave(2, 3) if up else y
    y = F.conv2d(y, block.conv_in.weight, block.conv_in.bias, padding=1)
    y = F.silu(F.group_norm(y, width // 4, block.norm_out.weight, block.norm_out.bias, 1e-6))
    y = F.conv2d(y, block.conv_out.weight, block.conv_out.bias, padding=1)
    skip = F.conv2d(grown, block.skip.weight, block.skip.bias) if up or width_in != width else grown
    torch.testing.assert_close(block(x), (skip + y) * 0.5**0.5)


def test_a_new_block_passes_its_input_through():
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(Block(8, 8, up=False)(x), x * 0.5**0.5, rtol=0, atol=1e-4)


def test_a_decoder_starts_from_a_fixed_ramp_that_is_different_everywhere():
    ramp = DDNDecoder(1, 2, [1, 1], [8, 8], [2, 2]).origin
    torch.testing.assert_close(ramp, torch.linspace(-1, 1, 8)[None, :, None, None])
    places = decoder().origin
    assert places.shape == (1, 16, 2, 2)
    assert len(places.flatten(2)[0].T.unique(dim=0)) == 4
    assert places.min() >= -1 and places.max() <= 1
    assert "origin" not in decoder().state_dict()


def test_blocks_may_be_sharded_in_order_and_heads_stay_whole():
    network = decoder()
    assert network.shard_units() == list(network.blocks)
    assert all(callable(getattr(network, name)) for name in network.forward_methods)
    inside = {id(p) for unit in network.shard_units() for p in unit.parameters()}
    assert not any(id(head.weight) in inside for head in network.heads)


# The published networks


@pytest.mark.parametrize(
    ("experiment", "layers", "bits", "millions", "millions_in_heads"),
    [
        ("ddn_cifar10", 63, 378, 76.3, 1.5),
        ("ddn_ffhq64", 127, 1079, 109.4, 15.5),
        ("ddn_mnist", 10, 60, None, None),
        ("ddn_imagenet_brief", 6, 30, None, None),
    ],
)
def test_recipes_have_the_published_layers_bits_and_parameters(
    composed, experiment, layers, bits, millions, millions_in_heads
):
    config = composed(f"experiment={experiment}")
    with torch.device("meta"):
        network = instantiate(config.model.decoder)
    assert (len(network.leaves), network.bits) == (layers, bits)
    assert network.resolution == {"ddn_ffhq64": 64, "ddn_imagenet_brief": 64}.get(experiment, 32)
    if millions is not None:
        count = sum(p.numel() for p in network.parameters()) / 1e6
        in_heads = sum(p.numel() for p in network.heads.parameters()) / 1e6
        assert (round(count, 1), round(in_heads, 1)) == (millions, millions_in_heads)


@pytest.mark.parametrize(("start", "blocks"), [(1, [1, 2, 3]), (2, [1, 2]), (4, [4])])
def test_networks_start_at_any_size_and_double_from_there(start, blocks):
    network = DDNDecoder(1, 4, blocks, [8] * len(blocks), [2] * len(blocks), start=start)
    codes = torch.zeros(2, sum(blocks), dtype=torch.int64)
    sizes = [network.decode(codes, layers=depth).shape[-1] for depth in range(1, sum(blocks) + 1)]
    expected = [start * 2**stage for stage, count in enumerate(blocks) for _ in range(count)]
    assert sizes == expected and network.bits == sum(blocks)


# What is refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"leaves": [5, 1, 7]}, r"leaves is \[5, 1, 7\].*K >= 2"),
        ({"leaves": [0, 4, 7]}, "K >= 2"),
        ({"start": 1}, "resolution 8 is not reached: 3 stages that double from start=1 have 1, 2, 4 pixels"),
        ({"start": 0}, "resolution 8 is not reached"),
        ({"blocks": [2, 2]}, "one number per stage each, but have 2, 3 and 3"),
        ({"widths": [16, 16, 12, 8]}, "one number per stage each, but have 3, 4 and 3"),
        ({"leaves": []}, "one number per stage"),
        ({"blocks": [2, 0, 2]}, r"blocks is \[2, 0, 2\], but every stage needs at least one layer"),
        ({"widths": [16, 4, 12]}, "width 4 must be even"),
        ({"widths": [16, 15, 12]}, "width 15 must be even"),
        ({"widths": [16, 16, 130]}, "width 130 must be even, a multiple of its 32 groups"),
        ({"chain_dropout": 1.0}, r"chain_dropout is 1.0, but must be a probability in \[0, 1\)"),
        ({"chain_dropout": -0.1}, "chain_dropout is -0.1"),
    ],
)
def test_networks_that_cannot_be_are_refused_with_the_setting_to_change(wrong, said):
    with pytest.raises(ValueError, match=said):
        decoder(**wrong)
