"""What our benchmark of the transformer compares with trains as the expert does."""

import torch

from benchmarks.dit_step import ours, plain, plain_attention
from src.modules.networks.dit import DiT, attend


def network(**options):
    """A small one in float64 whose every weight matters."""
    built, generator = (
        DiT(1, 8, patch=4, width=16, depth=2, heads=2, **options).double(),
        torch.Generator().manual_seed(0),
    )
    for parameter in built.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)
    return built


def test_the_plain_loop_reaches_the_losses_and_weights_of_the_expert():
    images = torch.rand(6, 4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    networks = network(), network(checkpointing=True)
    steps = plain(networks[0]), ours(networks[1], bf16=False)
    for number, batch in enumerate(images):
        first, second = (step(batch, 4 * number) for step in steps)
        assert abs(first - second) < 1e-6 * first
    for a, b in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert (networks[0].head.weight - network().head.weight).abs().max() > 1e-3


def test_plain_attention_is_the_networks():
    q, k, v = torch.randn(3, 2, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_attention(q, k, v), attend(q, k, v))
