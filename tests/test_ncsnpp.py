"""The generator: published sizes, what each option changes, and what it refuses."""

import pytest
import torch

from src.modules.networks.ncsnpp import Attention, NCSNpp, ResidualBlock

TINY = dict(channels=3, resolution=16, width=8, multipliers=[1, 2], blocks=1, attention=[8], z_dim=4, z_width=8)


def tiny(**options):
    """A small generator in float64 whose every weight matters (the initialisation makes some of them all but zero)."""
    network = NCSNpp(**(TINY | dict(z_layers=1) | options)).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        parameter.data.normal_(0, fan_in**-0.5, generator=generator)
    return network


def inputs(n=2, resolution=16):
    """A noisy image, integer times from 0, and z."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, resolution, resolution, dtype=torch.float64, generator=generator)
    return x, torch.arange(n), torch.randn(n, 4, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        (dict(resolution=32), 48_432_515),  # CIFAR-10
        (dict(resolution=256, width=64, multipliers=[1, 1, 2, 2, 4, 4], z_layers=3), 39_726_979),  # CelebA-HQ, LSUN
        (dict(resolution=32, width=32), 4_786_211),
    ],
)
def test_published_sizes(options, parameters):
    with torch.device("meta"):
        network = NCSNpp(channels=3, **options)
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert list(network.state_dict()) == [name for name, _ in network.named_parameters()]  # no kernels, no buffers


def test_starts_near_zero_with_unit_gains():
    network = NCSNpp(**TINY)
    x, t, z = inputs()
    assert 0 < network(x.float(), t, z.float()).abs().max() < 1e-3
    style = network.middle_in.norm1.style.bias
    assert style.tolist() == [1] * 16 + [0] * 16


@torch.no_grad()
@pytest.mark.parametrize("embedding", ["positional", "fourier"])
def test_every_input_matters_and_samples_are_independent(embedding):
    network, (x, t, z) = tiny(embedding=embedding), inputs()
    image = network(x, t, z)
    assert image.shape == x.shape and image.dtype == torch.float64
    assert image.isfinite().all() and image.abs().max() <= 1  # t = 0 included
    for changed in [network(x + 0.1, t, z), network(x, t + 1, z), network(x, t, -z)]:
        assert (changed - image).abs().mean() > 1e-3
    torch.testing.assert_close(network(x[1:], t[1:], z[1:]), image[1:], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(network(x, t, 7 * z), image, rtol=1e-6, atol=1e-6)  # z is pixel-normalised


@torch.no_grad()
@pytest.mark.parametrize(("progressive", "sees_image"), [("residual", True), ("input_skip", True), ("none", False)])
def test_progressive_input_is_a_second_way_for_the_image(progressive, sees_image):
    network, (x, t, z) = tiny(progressive_input=progressive, resolution=32, multipliers=[1, 2, 2]), inputs(2, 32)
    network.stem.weight.zero_()  # closes the first way
    changed = (network(x, t, z) - network(-x, t, z)).abs().max() > 1e-3
    assert changed == sees_image
    channels = [level.pyramid.conv.in_channels for level in network.down if level.pyramid is not None]
    assert channels == {"residual": [3, 8], "input_skip": [3, 3], "none": []}[progressive]


def test_attention_only_where_asked():
    for attention, count in [([], 1), ([8], 1 + 1 + 1), ([16, 8], 1 + 2 + 2)]:
        network = NCSNpp(**(TINY | dict(attention=attention)))
        assert sum(isinstance(module, Attention) for module in network.modules()) == count
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attend = tiny().middle_attention
    h = attend.norm(x).flatten(2)  # (n, c, pixels)
    q, k, v = (layer.weight[:, :, 0, 0] @ h + layer.bias[:, None] for layer in (attend.q, attend.k, attend.v))
    weights = (torch.einsum("ncp,ncq->npq", q, k) / 4).softmax(dim=2)
    h = torch.einsum("npq,ncq->ncp", weights, v)
    h = attend.out.weight[:, :, 0, 0] @ h + attend.out.bias[:, None]
    torch.testing.assert_close(attend(x), (x + h.view_as(x)) / 2**0.5, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_labels():
    network, (x, t, z) = tiny(classes=3), inputs()
    images = [network(x, t, z, torch.full((2,), label)) for label in range(3)]
    assert min((images[a] - images[b]).abs().mean() for a, b in [(0, 1), (0, 2), (1, 2)]) > 1e-3
    with pytest.raises(ValueError, match="pass labels"):
        network(x, t, z)

    plain = tiny()
    assert set(network.state_dict()) - set(plain.state_dict()) == {"label_embedding.weight"}
    assert torch.equal(plain(x, t, z, torch.tensor([0, 1])), plain(x, t, z))
    network.load_state_dict(plain.state_dict(), strict=False)
    network.label_embedding.weight.zero_()  # it is added to the embedding of z
    assert torch.equal(network(x, t, z, torch.tensor([0, 1])), plain(x, t, z))


@torch.no_grad()
def test_shard_units_run_once_each_and_in_order():
    network, ran = tiny(blocks=2, attention=[16, 8]), []
    for module in network.modules():
        if isinstance(module, ResidualBlock | Attention):
            module.register_forward_hook(lambda module, *_: ran.append(module))
    network(*inputs())
    assert [id(unit) for unit in network.shard_units()] == [id(module) for module in ran]
    assert network.forward_methods == ()


def test_forward_draws_no_random_numbers():
    network, before = tiny(), torch.get_rng_state()
    network(*inputs())
    assert torch.equal(before, torch.get_rng_state())


def test_compiles_without_graph_breaks():
    network = tiny()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs()), network(*inputs()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (dict(resolution=17), "2 divides, not 17: change data.resolution or shorten"),
        (dict(resolution=32), r"attention at \[8\] never happens: .* \[32, 16\]; set attention"),
        (dict(multipliers=[]), "one number per level"),
        (dict(progressive_input="skip"), "choose one of residual, input_skip, none"),
        (dict(embedding="learned"), "positional or fourier"),
        (dict(classes=-1), "0 for a network without labels"),
    ],
)
def test_impossible_sizes(options, fix):
    with pytest.raises(ValueError, match=fix):
        NCSNpp(**(TINY | options))
