"""One DDGAN step and one sampling run against values of the published implementation, on its own random weights."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from src.diffusion import Diffusion
from src.modules.networks.discriminators import LargeDiscriminator, SmallDiscriminator
from src.modules.networks.ncsnpp import NCSNpp
from src.modules.networks.reference_names import discriminator_state, generator_state

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", params=["small_32", "large_64"])
def golden(request):
    """The recorded values with our networks carrying the recorded weights."""
    case = SimpleNamespace(**torch.load(GOLDEN / f"ddgan_{request.param}.pt", weights_only=True))
    c = case.config
    case.diffusion = Diffusion(c["num_timesteps"], c["beta_min"], c["beta_max"])
    case.generator = NCSNpp(
        channels=c["num_channels"],
        resolution=c["image_size"],
        width=c["num_channels_dae"],
        multipliers=c["ch_mult"],
        blocks=c["num_res_blocks"],
        attention=c["attn_resolutions"],
        z_dim=c["nz"],
        z_width=c["z_emb_dim"],
        z_layers=c["n_mlp"],
        progressive_input=c["progressive_input"],
        embedding=c["embedding_type"],
    )
    discriminator = {"small": SmallDiscriminator, "large": LargeDiscriminator}[c["disc"]]
    case.discriminator = discriminator(c["num_channels"], c["image_size"], c["ngf"], c["t_emb_dim"])
    case.generator.load_state_dict(generator_state(case.generator_state, case.generator))
    case.discriminator.load_state_dict(discriminator_state(case.discriminator_state, case.discriminator))
    return case


def distance(value, expected):
    """Relative distance of two tensors in the Euclidean norm."""
    return ((value - expected).norm() / expected.norm()).item()


def test_schedule(golden):
    s, d = golden.schedule, golden.diffusion
    tables = {
        "betas": d.betas,
        "a_s_cum": d.alphas_bar.sqrt(),
        "sigmas_cum": (1 - d.alphas_bar).sqrt(),
        "posterior_mean_coef1": d.posterior_coefficients[0],
        "posterior_mean_coef2": d.posterior_coefficients[1],
        "posterior_variance": d.posterior_variance,
        "posterior_log_variance_clipped": d.posterior_log_variance,
    }
    for name, table in tables.items():
        torch.testing.assert_close(table.float(), s[name], rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close((1 - d.betas).sqrt().float(), s["a_s"][1:], rtol=1e-5, atol=0)
    torch.testing.assert_close(d.betas.sqrt().float(), s["sigmas"][1:], rtol=1e-5, atol=0)


def test_pair_and_posterior(golden):
    i, e = golden.inputs, golden.expected
    x_t, x_next = golden.diffusion.q_pair(i["x0"], i["t"], i["noise_x_t"], i["noise_x_next"])
    assert distance(x_t, e["x_t"]) < 1e-6
    assert distance(x_next, e["x_next"]) < 1e-6
    assert torch.equal(x_t[0], i["x0"][0]) and i["t"][0] == 0  # at t = 0, x_t is the image itself
    x_fake = golden.diffusion.posterior_sample(e["x0_hat"], e["x_next"], i["t"], i["noise_posterior"])
    assert distance(x_fake, e["x_fake"]) < 1e-6


def test_discriminator_step(golden):
    # The batch is one group of four, where the reference's strided groups and consecutive samples are the same.
    i, e, critic = golden.inputs, golden.expected, golden.discriminator
    critic.zero_grad()
    x_t = e["x_t"].clone().requires_grad_()
    logit_real = critic(x_t, i["t"], e["x_next"])
    logit_fake = critic(e["x_fake"], i["t"], e["x_next"])
    torch.testing.assert_close(logit_real, e["logit_real"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logit_fake, e["logit_fake"], rtol=1e-5, atol=1e-7)

    (gradient,) = torch.autograd.grad(logit_real.sum(), x_t, create_graph=True)
    r1 = golden.config["r1_gamma"] / 2 * gradient.square().sum(dim=(1, 2, 3)).mean()
    loss_real, loss_fake = F.softplus(-logit_real).mean(), F.softplus(logit_fake).mean()
    for loss, name in [(r1, "r1"), (loss_real, "loss_real"), (loss_fake, "loss_fake")]:
        torch.testing.assert_close(loss, e[name], rtol=1e-5, atol=0)

    (loss_real + r1 + loss_fake).backward()
    gradients = discriminator_state(e["grad_discriminator"], critic)
    assert {n: d for n, p in critic.named_parameters() if (d := distance(p.grad, gradients[n])) > 1e-4} == {}


def test_generator_step(golden):
    i, e = golden.inputs, golden.expected
    golden.generator.zero_grad()
    x0_hat = golden.generator(e["x_next"], i["t"], i["z"])
    assert distance(x0_hat, e["x0_hat"]) < 1e-5
    x_fake = golden.diffusion.posterior_sample(x0_hat, e["x_next"], i["t"], i["noise_posterior"])
    loss = F.softplus(-golden.discriminator(x_fake, i["t"], e["x_next"])).mean()
    torch.testing.assert_close(loss, e["loss_g"], rtol=1e-5, atol=0)

    loss.backward()
    # Names are translated by a state whose values are the norms, spread over tensors of the right shape.
    spread = {n: torch.full_like(v, e["grad_generator_norm"][n].item()) for n, v in golden.generator_state.items()}
    norms = generator_state(spread, golden.generator)
    pairs = {n: (p.grad.norm().item(), norms[n].flatten()[0].item()) for n, p in golden.generator.named_parameters()}
    zero = {n: pairs.pop(n) for n in list(pairs) if n.endswith(".k.bias")}  # softmax ignores it: nothing but rounding
    assert zero and max(max(pair) for pair in zero.values()) < 1e-8
    assert {n: pair for n, pair in pairs.items() if pair[0] != pytest.approx(pair[1], rel=1e-4)} == {}


@torch.no_grad()
def test_sampler(golden):
    x, run = golden.sampler["x_init"], golden.sampler
    for step, (z, noise) in enumerate(zip(run["z"], run["noise"], strict=True)):
        t = torch.full((len(x),), golden.diffusion.steps - 1 - step)
        x = golden.diffusion.posterior_sample(golden.generator(x, t, z), x, t, noise)
    assert distance(x, run["image"]) < 1e-5


@torch.no_grad()
def test_bf16_autocast(golden):
    i, e = golden.inputs, golden.expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x0_hat = golden.generator(e["x_next"], i["t"], i["z"])
        logits = golden.discriminator(e["x_fake"], i["t"], e["x_next"])
    assert x0_hat.dtype == torch.float32  # images stay in the precision in which they came
    assert 1e-4 < distance(x0_hat, e["x0_hat"]) < 0.05  # and yet the convolutions ran in bfloat16
    assert 1e-4 < distance(logits.float(), e["logit_fake"]) < 0.05


def test_checkpoints_with_a_prefix_and_misfits(golden):
    prefixed = {f"module.{name}": value for name, value in golden.generator_state.items()}
    ours = generator_state(prefixed, golden.generator)
    assert ours.keys() == golden.generator.state_dict().keys()
    assert torch.equal(ours["stem.weight"], golden.generator_state["all_modules.2.weight"])

    misfit = dict(golden.generator_state, extra=torch.zeros(1))
    del misfit["all_modules.2.bias"]
    misfit["z_transform.1.weight"] = torch.zeros(3, 5)
    with pytest.raises(ValueError) as error:
        generator_state(misfit, golden.generator)
    assert "(3 differences)" in str(error.value)
    for part in ["all_modules.2.bias is missing", "z_transform.1.weight has shape (3, 5)", "extra is unknown"]:
        assert part in str(error.value)

    with pytest.raises(ValueError, match=r"all_modules\.0\.weight is unknown"):
        discriminator_state(dict(golden.discriminator_state) | golden.generator_state, golden.discriminator)
