"""DeepSpeed's ZeRO with an engine for each network, on GPUs and (for tests) on CPUs.

Networks run as plain modules, never through DeepSpeedEngine.forward, whose hooks take a gradient inside the loss for
the end of a backward pass. What a network keeps whole stays outside of its engine, with an optimizer of its own.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from src import checkpoint as canonical
from src.engine import Engine
from src.protocols import KeptWhole
from src.sharding import Piece, total_norm
from src.strategies.ddp import ManualDDP

BUCKET = 2**26  # numbers that travel at once, at most


class DeepSpeed(ManualDDP):
    """ZeRO stage 0 (nothing in parts), 1 (optimizer state), 2 (and gradients) or 3 (and parameters).

    Args:
        stage: of ZeRO.
        offload_optimizer: keep the optimizer's state in host memory.
        zero: more settings of DeepSpeed's `zero_optimization`.
        options: of ManualDDP.
    """

    def __init__(self, stage: int, offload_optimizer: bool = False, zero: dict | None = None, **options):
        super().__init__(**options)
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"strategy.stage={stage} is unknown; ZeRO has the stages 0 to 3")
        if offload_optimizer and not stage:
            raise ValueError("strategy.offload_optimizer needs a stage of at least 1; set strategy.stage")
        self.stage, self.offload_optimizer, self.zero = stage, offload_optimizer, dict(zero or {})
        self.engine = _Zero(self)

    def setup_distributed(self) -> None:
        if self.root_device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        super().setup_distributed()
        deepspeed = _deepspeed()
        deepspeed.init_distributed(
            self._get_process_group_backend(), dist_init_required=False, auto_mpi_discovery=False
        )

    def setup(self, trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = self.lightning_module
        for (name, network), optimizer in zip(module.parallel_networks().items(), self.optimizers, strict=True):
            maker, clip_norm = module.optimizer_makers[name], module.clip_norm
            sizes = [p.numel() for p in network.parameters()]
            self.engine.add(name, network, optimizer, maker, clip_norm, self._config(clip_norm, sizes))

    def _config(self, clip_norm: float | None, sizes: list[int]) -> dict:
        """DeepSpeed's settings for a network with parameters of so many numbers."""
        zero = {"stage": self.stage, "overlap_comm": self.root_device.type != "cpu"}
        bucket = max(*sizes, min(BUCKET, sum(sizes) // 8))
        zero["reduce_bucket_size"] = bucket  # DeepSpeed allocates all of it, for each network
        zero |= self.zero
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,  # only for its own statistics: the loss is a mean already
            "gradient_clipping": clip_norm or 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }


class _Zero(Engine):
    def __init__(self, strategy: DeepSpeed):
        self.strategy = strategy
        self.engines: dict[nn.Module, object] = {}
        self.whole: dict[nn.Module, Optimizer] = {}  # the optimizers of parameters that are kept whole

    @property
    def native(self) -> str | None:
        """Pieces depend on the number of processes."""
        stage, processes = self.strategy.stage, self.strategy.world_size
        return f"deepspeed_zero{stage} on {processes} process{'es' * (processes > 1)}" if stage else None

    def add(self, name: str, network: nn.Module, optimizer: Optimizer, maker, clip_norm, config: dict) -> None:
        """Put a network into an engine of its own. Raises ValueError for what ZeRO cannot do."""
        kept = network.kept_whole() if isinstance(network, KeptWhole) else []
        if kept and self.strategy.stage == 3:
            raise ValueError(
                f"the {name} keeps some parameters whole, which ZeRO 3 does not; use strategy=deepspeed_zero2 or fsdp"
            )
        if kept and clip_norm is not None:
            raise ValueError(
                f"model.clip_norm={clip_norm} cannot be had under DeepSpeed, which does not see the parameters that "
                f"the {name} keeps whole; use strategy=fsdp, or model.clip_norm=null"
            )
        if kept:
            self.whole[network] = maker(kept)
            optimizer.param_groups[:] = [g for g in optimizer.param_groups if g["params"][0] not in set(kept)]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        try:
            self.engines[network] = _deepspeed().initialize(
                model=network, optimizer=optimizer, model_parameters=parameters, config=config, dist_init_required=False
            )[0]
        except ValueError as error:  # of several lines, the first of which says little
            said = " ".join(str(error).split())
            raise ValueError(f"strategy.zero={self.strategy.zero} is refused: {said}") from error

    @contextmanager
    def hold(self, network: nn.Module, twice: bool) -> Iterator[None]:
        with _gathered_until_the_end(network) if twice and self.strategy.stage == 3 else nullcontext():
            yield
        if network in self.whole:
            kept = [p for group in self.whole[network].param_groups for p in group["params"]]
            self.strategy.average(p.grad for p in kept if p.grad is not None)

    def add_gradients(self, module, network: nn.Module, loss: Tensor, last: bool) -> None:
        engine = self.engines[network]
        engine.set_gradient_accumulation_boundary(last)
        if self.strategy.stage > 0:
            engine.optimizer.clear_backward_seen_flag()  # as DeepSpeedEngine.forward does: else gradients do not add up
        engine.backward(loss)

    def step(self, network: nn.Module, optimizer: Optimizer, clip_norm: float | None) -> Tensor:
        engine, kept = self.engines[network], self.whole.get(network)
        norms = []
        if self.strategy.stage == 0:
            in_engine = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(total_norm(p.grad for p in in_engine if p.grad is not None))
        if kept is not None:
            norms.append(total_norm(p.grad for group in kept.param_groups for p in group["params"]))
            for group in kept.param_groups:
                group["lr"] = optimizer.param_groups[0]["lr"]
            kept.step()
            kept.zero_grad(set_to_none=True)
        engine.step()
        if self.strategy.stage > 0:
            norms.append(torch.as_tensor(engine.get_global_grad_norm(), device=self.strategy.root_device).float())
        return total_norm(norms)

    def moments(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict:
        return next(kept.state[parameter] for kept in self.whole.values() if parameter in kept.state)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        values = module.state_dict(keep_vars=True)
        return {name: self.together(value, self.part(value)) for name, value in values.items()}

    @torch.no_grad()
    def load_weights(self, module: nn.Module, weights: dict[str, Tensor], where: str) -> None:
        values = module.state_dict(keep_vars=True)
        canonical.require_alike({n: tuple(getattr(v, "ds_shape", v.shape)) for n, v in values.items()}, weights, where)
        for name, value in values.items():
            self.part(value).copy_(self.apart(value, weights[name]))
        self.parts_read(module)

    def parts_read(self, module: nn.Module) -> None:
        for network, engine in self.engines.items():
            self.parts_written(network)
            if self.strategy.stage > 0:
                engine.optimizer.refresh_fp32_params()

    def optimizer_state(self, network: nn.Module, optimizer: Optimizer) -> dict[str, dict]:
        state = canonical.optimizer_state(network, self.whole[network]) if network in self.whole else {}
        if self.strategy.stage == 0:
            return state | canonical.optimizer_state(network, optimizer)
        from deepspeed.utils import safe_get_full_optimizer_state

        network.requires_grad_(True)  # it has nothing to say of frozen ones; the next turn freezes them again
        one = next(iter(optimizer.state.values()))  # of a part of all parameters
        moments = [key for key, value in one.items() if torch.is_tensor(value) and value.dim()]
        others = {key: value for key, value in one.items() if key not in moments}
        flats = {p: optimizer.state[flat] for flat, group in self._flat_groups(network) for p in group}
        for name, parameter in network.named_parameters():
            if name in state:
                continue
            state[name] = {k: v.clone() if torch.is_tensor(v) else v for k, v in others.items()}
            for key in moments:
                if self.leaving_parts:
                    state[name][key] = self._piece(parameter, flats[parameter][key])
                else:
                    state[name][key] = safe_get_full_optimizer_state(parameter, key)
        return state

    def load_optimizer(self, network: nn.Module, optimizer: Optimizer, state: dict[str, dict]) -> None:
        names = {parameter: name for name, parameter in network.named_parameters()}
        optimizers = [self.whole[network]] if network in self.whole else []
        optimizers += [optimizer] if self.strategy.stage == 0 else []
        for plain in optimizers:
            for parameter in (p for group in plain.param_groups for p in group["params"]):
                plain.state[parameter] = _on(parameter.device, state[names[parameter]])
        if self.strategy.stage == 0:
            return
        for flat, group in self._flat_groups(network):
            values = next((found for p in group if (found := state[names[p]])), {})
            moments = [key for key, value in values.items() if torch.is_tensor(value) and value.dim()]
            optimizer.state[flat] = _on(flat.device, {k: v for k, v in values.items() if k not in moments})
            optimizer.state[flat] |= {key: torch.zeros_like(flat) for key in moments}
            for parameter in (p for p in group if state[names[p]]):
                for key, value in ((key, state[names[parameter]][key]) for key in moments):
                    if not value.is_meta:
                        numbers, start, _ = self._piece(parameter, optimizer.state[flat][key])
                        numbers.copy_(value.flatten()[start : start + len(numbers)])

    def _flat_groups(self, network: nn.Module) -> Iterator[tuple[Tensor, list[nn.Parameter]]]:
        """The flat tensors that the optimizer knows, and the parameters of which each holds this process's parts."""
        zero = self.engines[network].optimizer
        flats = zero.fp32_partitioned_groups_flat if self.strategy.stage == 3 else zero.single_partition_of_fp32_groups
        groups = zero.fp16_groups if self.strategy.stage == 3 else zero.bit16_groups
        return zip(flats, groups, strict=True)

    def _piece(self, parameter: nn.Parameter, moment: Tensor) -> Piece:
        """The part of a parameter's moment that this process keeps, which lies somewhere in the flat one."""
        if self.strategy.stage == 3:
            zero = parameter._z3_optimizer
            _, start, numel = zero.grad_position[zero.get_param_id(parameter)]
            return self._of_equal_parts(parameter, moment.narrow(0, int(start), int(numel)))
        if (mapping := parameter._hp_mapping) is None:
            return Piece(moment[:0], 0, parameter.shape)
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(moment.narrow(0, here.start, here.numel), there.start, parameter.shape)

    def _of_equal_parts(self, parameter: nn.Parameter, part: Tensor) -> Piece:
        """What ZeRO 3 keeps of a parameter here, without the numbers that only make all parts equally long."""
        start = min(self.strategy.global_rank * len(part), parameter.ds_numel)
        return Piece(part[: parameter.ds_numel - start], start, parameter.ds_shape)

    def alike(self, parameter: nn.Parameter) -> bool:
        return not hasattr(parameter, "ds_tensor")

    def part(self, parameter: nn.Parameter) -> Tensor:
        return parameter.ds_tensor.data if hasattr(parameter, "ds_tensor") else parameter.detach()

    def parts_written(self, network: nn.Module) -> None:
        if self.strategy.stage == 3:
            self.engines[network].optimizer.empty_partition_cache()  # frees what is whole, without writing it back

    def together(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        if not hasattr(parameter, "ds_tensor"):
            return part
        if self.leaving_parts:
            return self._of_equal_parts(parameter, part)
        parts = [torch.empty_like(part) for _ in range(self.strategy.world_size)]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape).cpu()

    def apart(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        if not hasattr(parameter, "ds_tensor"):
            return value
        size = parameter.ds_tensor.numel()
        if value.is_meta:
            return torch.zeros_like(parameter.ds_tensor, dtype=value.dtype)
        padded = torch.nn.functional.pad(value.flatten(), (0, size * self.strategy.world_size - value.numel()))
        return padded.narrow(0, self.strategy.global_rank * size, size)


@contextmanager
def _gathered_until_the_end(network: nn.Module) -> Iterator[None]:
    """All ZeRO 3 parameters whole until the turn's last backward pass: a reader is entered for each, so that DeepSpeed
    does not let go of them in between. Uses what DeepSpeed keeps to itself; the comparison with one process watches it.
    """
    parameters = [p for p in network.parameters() if hasattr(p, "ds_status")]
    missing = [p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"]
    if missing:
        missing[0].all_gather(param_list=missing)
    for parameter in parameters:
        parameter.ds_active_sub_modules.add("a turn")
    yield
    for parameter in parameters:
        parameter.ds_active_sub_modules.discard("a turn")
    free = [p for p in parameters if not p.ds_persist]
    if free:
        free[0].partition(param_list=free, free_data=True)


def _on(device: torch.device, state: dict) -> dict:
    return {key: value.to(device, copy=True) if torch.is_tensor(value) else value for key, value in state.items()}


def _deepspeed():
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError("strategy=deepspeed_... needs the package deepspeed: pip install deepspeed==0.19.8") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
