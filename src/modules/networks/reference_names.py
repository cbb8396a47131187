"""Translates checkpoints of the published implementations of DDGAN and DiT to our parameter names.

There DDGAN's generator is one flat list, `all_modules.N`, in the order in which its layers run; here every block has a
name. Each function pairs the names of a given network, so that a checkpoint fits it or says where it does not.
"""

import argparse
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from src.modules.networks.discriminators import Discriminator
from src.modules.networks.dit import DiT
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
DIT = {
    "stem": "x_embedder.proj",
    "time_embedding.fc1": "t_embedder.mlp.0",
    "time_embedding.fc2": "t_embedder.mlp.2",
    "label_embedding": "y_embedder.embedding_table",
    "head_modulation": "final_layer.adaLN_modulation.1",
    "head": "final_layer.linear",
}
DIT_BLOCK = {
    "modulation": "adaLN_modulation.1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
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


def dit_state(reference_state: Mapping[str, Tensor], network: DiT) -> dict[str, Tensor]:
    """The reference's DiT weights (with or without `module.`) under the names of `network`.

    Raises ValueError that names the first three keys or shapes that differ, or for positions unlike the network's,
    which alone tell the image's size.
    """
    state = {key.removeprefix("module."): value for key, value in reference_state.items()}
    positions = state.pop("pos_embed", network.positions).flatten(0, -2)
    if positions.shape != network.positions.shape or (positions - network.positions).abs().max() > 1e-5:
        raise ValueError(
            f"this reference checkpoint has {len(positions)} positions, which are not the {len(network.positions)} of "
            f"{type(network).__name__}: build the network with the resolution, patch and width of the checkpoint"
        )
    names = dict(DIT)
    for index in range(len(network.blocks)):
        names |= {f"blocks.{index}.{ours}": f"blocks.{index}.{theirs}" for ours, theirs in DIT_BLOCK.items()}
    return translated(state, network, names)


def published_dit(path: str, network: DiT) -> dict[str, Tensor]:
    """The weights of a published DiT's file, such as DiT-XL-2-256x256.pt, under the names of `network`.

    Of a checkpoint of its training the averages are taken. Raises ValueError where the file cannot be read, or is of
    another architecture.
    """
    content = _read(path, "a published DiT", "DiT-XL-2-256x256.pt or another file of its weights")
    return dit_state(content.get("ema", content), network)


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


def published_state(path: str, generator: NCSNpp, discriminator: Discriminator, fresh: dict[str, Tensor]) -> dict:
    """The canonical state of a published `content.pth` or `netG_*.pth`; `fresh` fills in what the file does not hold.

    Raises ValueError where the file cannot be read, or is of another architecture.
    """
    content = _read(path, "a checkpoint of the published DDGAN", "content.pth or netG_*.pth")
    if "netG_dict" not in content:
        averages = _prefixed("generator", generator_state(content, generator))
        return _canonical(fresh | averages, averages, {}, 0, 0)
    weights = _prefixed("generator", generator_state(content["netG_dict"], generator))
    weights |= _prefixed("discriminator", discriminator_state(content["netD_dict"], discriminator))
    by_name = _moments(content["netG_dict"], content["optimizerG"])
    averages = {}
    if by_name and "ema" in next(iter(by_name.values())):
        stored = {name: state["ema"] for name, state in by_name.items()}
        averages = _prefixed("generator", generator_state(content["netG_dict"] | stored, generator))
    optimizers = {
        "generator": _translated_moments(content["netG_dict"], by_name, lambda s: generator_state(s, generator)),
        "discriminator": _translated_moments(
            content["netD_dict"],
            _moments(content["netD_dict"], content["optimizerD"]),
            lambda s: discriminator_state(s, discriminator),
        ),
    }
    options = content["args"]
    processes = getattr(options, "num_process_per_node", 1) * getattr(options, "num_proc_node", 1)
    batches = int(content["global_step"])
    return _canonical(fresh | weights, averages, optimizers, batches * options.batch_size * processes, batches)


def _read(path: str, what: str, files: str) -> dict:
    """A file's dictionary, of which nothing is executed. Raises ValueError where it is none."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} cannot be read as {what} ({type(error).__name__}); give a {files} of tensors, plain containers "
            f"and an argparse.Namespace only"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not {what}: give a {files}")
    return content


def _canonical(weights: dict, averages: dict, optimizers: dict, images: int, batches: int) -> dict[str, Any]:
    callbacks = {"EMA": {"averages": averages}} if averages else {}
    position = {"images": images, "batches": batches}
    return {"weights": weights, "optimizers": optimizers, "callbacks": callbacks, "position": position, "metrics": {}}


def _moments(network: Mapping[str, Tensor], optimizer: dict) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> its entry of the optimizer's state; parameters are numbered in the order of the state dict."""
    names = [name for name in network if not name.endswith("sigmas")]
    order = [number for group in optimizer["param_groups"] for number in group["params"]]
    if len(names) != len(order):
        raise ValueError(f"the optimizer knows {len(order)} parameters, but the network has {len(names)}")
    return {name: optimizer["state"][number] for name, number in zip(names, order, strict=True)}


def _translated_moments(network, by_name, translate) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for key in ("exp_avg", "exp_avg_sq"):
        stored = {name: state[key] for name, state in by_name.items()}
        for name, value in translate(dict(network) | stored).items():
            found.setdefault(name, {})[key] = value
    step = float(next(iter(by_name.values()))["step"])
    return {name: {"step": torch.tensor(step)} | state for name, state in found.items()}


def _prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": value for name, value in state.items()}
