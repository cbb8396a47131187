"""Shared layers against literal definitions: FIR resampling, time embeddings, minibatch statistics, initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F

from src.modules.networks import layers


def images(n, c, size, dtype=torch.float64):
    """Standard normal images from a generator of their own."""
    return torch.randn(n, c, size, size, dtype=dtype, generator=torch.Generator().manual_seed(0))


def literal_fir(x, pad, up=1, down=1):
    """Insert zeros, pad, convolve with [1, 3, 3, 1] x [1, 3, 3, 1] / 64 * up^2 pixel by pixel, keep every `down`-th."""
    n, c, h, w = x.shape
    spread = x.new_zeros(n, c, h * up, w * up)
    spread[:, :, ::up, ::up] = x
    padded = F.pad(spread, (*pad, *pad))
    taps = [up / 8, 3 * up / 8, 3 * up / 8, up / 8]
    height, width = padded.shape[2] - 3, padded.shape[3] - 3
    result = x.new_zeros(n, c, height, width)
    for i in range(4):
        for j in range(4):
            result += taps[i] * taps[j] * padded[:, :, i : i + height, j : j + width]
    return result[:, :, ::down, ::down]


@pytest.mark.parametrize(
    ("resample", "literal"),
    [
        (layers.fir_downsample, dict(pad=(1, 1), down=2)),
        (layers.fir_upsample, dict(pad=(2, 1), up=2)),
        (layers.fir_blur, dict(pad=(2, 2))),
    ],
)
def test_fir_is_pad_and_convolve(resample, literal):
    x = images(2, 3, 8)
    torch.testing.assert_close(resample(x), literal_fir(x, **literal), rtol=0, atol=1e-14)


def test_fir_keeps_brightness_and_input_type():
    flat = torch.ones(1, 2, 8, 8, dtype=torch.bfloat16)
    for resample in (layers.fir_downsample, layers.fir_upsample):
        result = resample(flat)
        assert result.dtype == torch.bfloat16
        assert (result[:, :, 1:-1, 1:-1] == 1).all()  # gain 1 away from the zero padding


def test_a_kernel_made_while_sampling_serves_training():
    layers.kept_fir_kernel.cache_clear()
    with torch.inference_mode():
        layers.fir_downsample(images(1, 7, 4))
    x = images(1, 7, 4).requires_grad_()
    layers.fir_downsample(x).sum().backward()
    assert x.grad.sum() == pytest.approx(7 * 4 * (7 / 8) ** 2)  # one tap of each border pixel's window lies outside
    assert layers.kept_fir_kernel.cache_info().misses == 1


def test_fir_compiles_without_graph_breaks():
    def there_and_back(x):
        return layers.fir_upsample(layers.fir_downsample(x)) + layers.fir_blur(x)[:, :, 1:, 1:]

    x = images(1, 2, 8)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), there_and_back(x), rtol=0, atol=1e-14)


def test_positional_features():
    features = layers.positional_features(torch.tensor([0.0, 3.0], dtype=torch.float64), 8)
    frequencies = [10000 ** (-i / 3) for i in range(4)]  # half - 1 in the exponent: from 1 down to 1e-4
    expected = [math.sin(3 * f) for f in frequencies] + [math.cos(3 * f) for f in frequencies]
    assert features[0].tolist() == [0] * 4 + [1] * 4
    assert features[1].tolist() == pytest.approx(expected, rel=1e-12)


def test_fourier_features_are_finite_at_zero_and_gaussian():
    width = 1000
    features = layers.fourier_features(torch.tensor([0.0, math.e - 1, 3.0], dtype=torch.float64), width, scale=0.01)
    assert features[0].tolist() == [0] * width + [1] * width
    frequencies = torch.asin(features[1, :width]) / (2 * math.pi)  # log(1 + t) = 1, angles small enough to invert
    assert frequencies.square().mean().sqrt().item() == pytest.approx(0.01, rel=1e-2)
    assert (frequencies < 0.01).double().mean().item() == pytest.approx(math.erf(math.sqrt(0.5)), abs=2e-3)


def test_time_embedding_is_two_layers_on_the_features():
    embedding = layers.TimeEmbedding(8, 16, F.silu).double()
    t = torch.tensor([0, 2, 5])
    hidden = embedding.fc1(layers.positional_features(t.double(), 8))
    expected = embedding.fc2(hidden * torch.sigmoid(hidden))
    torch.testing.assert_close(embedding(t), expected, rtol=1e-12, atol=1e-12)
    assert embedding.bfloat16()(t).dtype == torch.bfloat16


@pytest.mark.parametrize(("kind", "features", "fix"), [("sinus", 8, "positional or fourier"), ("fourier", 7, "even")])
def test_impossible_time_embeddings(kind, features, fix):
    with pytest.raises(ValueError, match=fix):
        layers.TimeEmbedding(features, 16, F.silu, kind)


def test_minibatch_std_of_consecutive_samples():
    x = images(8, 3, 2)
    result = layers.minibatch_std(x, 4)
    assert torch.equal(result[:, :3], x)
    for members in (slice(0, 4), slice(4, 8)):
        deviation = ((x[members] - x[members].mean(0)) ** 2).mean(0).add(1e-8).sqrt().mean().item()
        assert result[members, 3].flatten().tolist() == pytest.approx([deviation] * 16, rel=1e-12)
    assert result[0, 3, 0, 0] != result[4, 3, 0, 0]


def test_minibatch_std_equals_strided_groups_of_a_permuted_batch():
    x = images(8, 3, 2)
    order = torch.arange(8).view(4, 2).t().flatten()  # strided groups 0 2 4 6 and 1 3 5 7, made consecutive
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    strided = (x.view(4, 2, 3, 2, 2).var(0, correction=0) + 1e-8).sqrt().mean(dim=(1, 2, 3)).repeat(4)  # (n,)
    torch.testing.assert_close(layers.minibatch_std(x[order], 4)[:, 3, 0, 0], strided[order], rtol=1e-12, atol=0)


def test_minibatch_std_of_small_and_odd_batches():
    x = images(3, 2, 2)
    expected = (x.var(0, correction=0) + 1e-8).sqrt().mean()
    torch.testing.assert_close(layers.minibatch_std(x, 4)[:, 2].mean(), expected, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"groups of 4 .* batch of 6: use a multiple of 4"):
        layers.minibatch_std(images(6, 2, 2), 4)


def test_minibatch_std_is_accurate_in_bf16():
    x = (100 + images(4, 2, 8)).bfloat16()  # a variance taken in bfloat16 would drown in the mean
    expected = layers.minibatch_std(x.double(), 4)[0, 2, 0, 0].item()
    assert layers.minibatch_std(x, 4).dtype == torch.bfloat16
    assert layers.minibatch_std(x, 4)[0, 2, 0, 0].item() == pytest.approx(expected, rel=5e-3)


def test_initialisation_scale():
    weight = layers.conv(96, 32, 3, scale=0.5).weight
    variance = 0.5 / (9 * (96 + 32) / 2)
    assert weight.var().item() == pytest.approx(variance, rel=0.03)
    assert weight.abs().max().item() == pytest.approx(math.sqrt(3 * variance), rel=1e-2)  # uniform
    assert layers.linear(8, 4).bias.tolist() == [0] * 4


@pytest.mark.parametrize(("channels", "groups"), [(16, 4), (96, 24), (128, 32), (256, 32), (144, 24), (3, 1)])
def test_group_norm_groups(channels, groups):
    assert layers.group_norm(channels).num_groups == groups
