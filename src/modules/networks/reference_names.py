"""Translates DDGAN checkpoints of the published implementation to our parameter names.

There the generator is one flat list, `all_modules.N`, in the order in which its layers run; here every block has a
name. Each function pairs the names of a given network, so that a checkpoint fits it or says where it does not.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from src.modules.networks.discriminators import Discriminator
from src.modules.networks.ncsnpp import Attention, NCSNpp, ResidualBlock, ResidualPyramid, SkipPyramid

RESIDUAL = {
    "norm1.style": "GroupNorm_0.style",
    "conv1": "Conv_0",
    "time": "Dense_0",
    "norm2.style": "GroupNorm_1.style",
    "conv2": "Conv_1",
    "skip": "Conv_2",
}
ATTENTION = {"norm": "GroupNorm_0", "q": "NIN_0", "k": "NIN_1", "v": "NIN_2", "out": "NIN_3"}
DOWN_BLOCK = {"conv1": "conv1.0", "time": "dense_t1", "conv2": "conv2.0", "skip": "skip.0"}
LAYERS = {
    ResidualBlock: RESIDUAL,
    Attention: ATTENTION,
    ResidualPyramid: {"conv": "Conv2d_0"},
    SkipPyramid: {"conv": "Conv_0"},
}


def generator_state(reference_state: Mapping[str, Tensor], network: NCSNpp) -> dict[str, Tensor]:
    """The reference's generator weights (with or without `module.`) under the names of `network`.

    Raises ValueError that names the first three keys or shapes that differ.
    """
    paths = {module: path for path, module in network.named_modules()}
    names = {}
    for index, layer in enumerate(network.layers_in_order()):
        for ours, theirs in LAYERS.get(type(layer), {"": ""}).items():
            names[f"{paths[layer]}.{ours}".rstrip(".")] = f"all_modules.{index}.{theirs}".rstrip(".")
    for index in range(len(network.z_mapping.layers)):
        names[f"z_mapping.layers.{index}"] = f"z_transform.{2 * index + 1}"  # pixel norm, then linear and SiLU in turn
    return translated(reference_state, network, names)


def discriminator_state(reference_state: Mapping[str, Tensor], network: Discriminator) -> dict[str, Tensor]:
    """The reference's discriminator weights (with or without `module.`) under the names of `network`.

    Raises ValueError that names the first three keys or shapes that differ.
    """
    names = {
        "time_embedding.fc1": "t_embed.main.0",
        "time_embedding.fc2": "t_embed.main.2",
        "stem": "start_conv",
        "head": "final_conv",
        "logit": "end_linear",
    }
    for index in range(len(network.blocks)):
        for ours, theirs in DOWN_BLOCK.items():
            names[f"blocks.{index}.{ours}"] = f"conv{index + 1}.{theirs}"
    return translated(reference_state, network, names)


def translated(state: Mapping[str, Tensor], network: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """`state` renamed by `names` (our layer -> theirs), with every key and shape checked against the network."""
    state = {key.removeprefix("module."): value for key, value in state.items()}
    result, problems, used = {}, [], set()
    for key, expected in network.state_dict().items():
        layer, _, kind = key.rpartition(".")
        theirs = f"{names.get(layer, layer)}.{kind}"
        if ".NIN_" in theirs:  # a 1x1 convolution kept as a matrix (inputs, outputs)
            theirs = theirs.removesuffix(".weight").removesuffix(".bias") + {"weight": ".W", "bias": ".b"}[kind]
        if theirs not in state:
            problems.append(f"{theirs} is missing")
            continue
        used.add(theirs)
        value = state[theirs]
        if theirs.endswith(".W"):
            value = value.t()[:, :, None, None]
        if value.shape != expected.shape:
            problems.append(f"{theirs} has shape {tuple(value.shape)} where {tuple(expected.shape)} is wanted")
        result[key] = value
    problems += [f"{key} is unknown" for key in state if key not in used]
    if problems:
        raise ValueError(
            f"this reference checkpoint does not fit {type(network).__name__} ({len(problems)} differences): "
            f"{'; '.join(problems[:3])}. Build the network with the options of the checkpoint"
        )
    return result
