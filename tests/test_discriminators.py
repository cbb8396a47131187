"""The discriminators: published sizes, conditioning, groups of samples, labels, and what they refuse."""

import pytest
import torch

from src.modules.networks.discriminators import DownBlock, LargeDiscriminator, SmallDiscriminator

BOTH = pytest.mark.parametrize(("kind", "resolution"), [(SmallDiscriminator, 16), (LargeDiscriminator, 64)])


def tiny(kind, resolution, **options):
    """A small discriminator in float64 whose every weight matters."""
    network = kind(3, resolution, **(dict(width=2, time_width=8) | options)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        parameter.data.normal_(0, fan_in**-0.5, generator=generator)
    return network


def inputs(n, resolution):
    """x_t, t and x_next."""
    generator = torch.Generator().manual_seed(2)
    x_t, x_next = torch.randn(2, n, 3, resolution, resolution, dtype=torch.float64, generator=generator)
    return x_t, torch.arange(n) % 4, x_next


@pytest.mark.parametrize(
    ("kind", "resolution", "parameters", "channels"),
    [
        (SmallDiscriminator, 32, 12_741_633, [128, 256, 512, 512]),
        (LargeDiscriminator, 256, 27_737_217, [256, 512, 512, 512, 512, 512]),
    ],
)
def test_published_sizes(kind, resolution, parameters, channels):
    with torch.device("meta"):
        network = kind(3, resolution)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert [block.conv1.out_channels for block in network.blocks] == channels
    assert list(network.state_dict()) == [name for name, _ in network.named_parameters()]  # no kernels, no buffers


@torch.no_grad()
@BOTH
def test_every_input_matters(kind, resolution):
    network, (x_t, t, x_next) = tiny(kind, resolution), inputs(4, resolution)
    logits = network(x_t, t, x_next)
    assert logits.shape == (4,)
    for changed in [network(-x_t, t, x_next), network(x_t, t + 1, x_next), network(x_t, t, -x_next)]:
        assert ((changed - logits).abs() > 1e-6).all()  # float64: rounding stays below 1e-12


@torch.no_grad()
@BOTH
def test_samples_meet_only_in_groups_of_consecutive_samples(kind, resolution):
    network, (x_t, t, x_next) = tiny(kind, resolution), inputs(8, resolution)
    logits = network(x_t, t, x_next)
    halves = [network(x_t[i : i + 4], t[i : i + 4], x_next[i : i + 4]) for i in (0, 4)]
    torch.testing.assert_close(logits, torch.cat(halves), rtol=1e-10, atol=1e-12)
    x_t[5] = 3 * x_t[5]
    changed = network(x_t, t, x_next)
    torch.testing.assert_close(changed[:4], logits[:4], rtol=1e-10, atol=1e-12)
    assert ((changed[4:] - logits[4:]).abs() > 1e-6).all()
    assert network(x_t[:3], t[:3], x_next[:3]).shape == (3,)
    with pytest.raises(ValueError, match="batch of 6: use a multiple of 4"):
        network(x_t[:6], t[:6], x_next[:6])


@torch.no_grad()
@BOTH
def test_labels_are_projected(kind, resolution):
    network, (x_t, t, x_next) = tiny(kind, resolution, classes=3), inputs(4, resolution)
    zeros, ones = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)
    of_zero, of_one = network(x_t, t, x_next, zeros), network(x_t, t, x_next, ones)
    assert ((of_zero - of_one).abs() > 1e-4).all()
    with pytest.raises(ValueError, match="pass labels"):
        network(x_t, t, x_next)

    plain = tiny(kind, resolution)
    assert set(network.state_dict()) - set(plain.state_dict()) == {"label_embedding.weight"}
    assert torch.equal(plain(x_t, t, x_next, ones), plain(x_t, t, x_next))
    network.load_state_dict(plain.state_dict(), strict=False)
    without_bias = plain(x_t, t, x_next) - plain.logit.bias
    network.label_embedding.weight[1] = 2 * plain.logit.weight[0]  # the same features, so this row adds twice the logit
    torch.testing.assert_close(network(x_t, t, x_next, ones), 3 * without_bias + plain.logit.bias, rtol=1e-9, atol=0)


@BOTH
def test_gradient_penalty_of_the_image_has_a_gradient(kind, resolution):
    network, (x_t, t, x_next) = tiny(kind, resolution), inputs(2, resolution)
    x_t.requires_grad_()
    (gradient,) = torch.autograd.grad(network(x_t, t, x_next).sum(), x_t, create_graph=True)
    gradient.square().sum().backward()
    weight = network.blocks[0].conv1.weight
    slope, step = weight.grad[0, 0, 1, 1].item(), 1e-5

    def penalty(change):
        with torch.no_grad():
            weight[0, 0, 1, 1] += change
        (gradient,) = torch.autograd.grad(network(x_t, t, x_next).sum(), x_t)
        with torch.no_grad():
            weight[0, 0, 1, 1] -= change
        return gradient.square().sum().item()

    assert slope == pytest.approx((penalty(step) - penalty(-step)) / (2 * step), rel=1e-2)


def test_starts_with_near_zero_residuals():
    for network, head in [(SmallDiscriminator(3, 8, 2, 8), 1e-5), (LargeDiscriminator(3, 64, 2, 8), 0.3)]:
        assert max(block.conv2.weight.abs().max().item() for block in network.blocks) < 1e-4
        assert 0 < network.head.weight.abs().max().item() < head
    assert network.head.weight.abs().max() > 0.1  # only the small one starts with a silent head


@torch.no_grad()
def test_shard_units_run_once_each_and_in_order():
    network, ran = tiny(SmallDiscriminator, 16), []
    for module in network.modules():
        if isinstance(module, DownBlock):
            module.register_forward_hook(lambda module, *_: ran.append(module))
    before = torch.get_rng_state()
    network(*inputs(4, 16))
    assert [id(unit) for unit in network.shard_units()] == [id(module) for module in ran]
    assert network.forward_methods == ()
    assert torch.equal(before, torch.get_rng_state())


def test_compiles_without_graph_breaks():
    network = tiny(SmallDiscriminator, 16)
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs(4, 16)), network(*inputs(4, 16)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options", "fix"),
    [
        (SmallDiscriminator, dict(resolution=28), "8 divides, not 28: change data.resolution"),
        (LargeDiscriminator, dict(resolution=32), "64 divides, not 32: .*the other discriminator"),
        (SmallDiscriminator, dict(resolution=32, group=0), "1 or more samples"),
        (SmallDiscriminator, dict(resolution=32, classes=-1), "0 for a network without labels"),
    ],
)
def test_impossible_sizes(kind, options, fix):
    with pytest.raises(ValueError, match=fix):
        kind(3, width=2, time_width=8, **options)
