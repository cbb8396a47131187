"""The layers of a network on several processes, one range after the other (torch.distributed.pipelining).

Every process keeps a copy of the whole network, for drawing samples, but trains and keeps gradients, activations and
optimizer state of its own layers alone; other processes' weights are fetched when they are needed.
"""

import time
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer

from src.protocols import Layered
from src.strategies.ddp import AtTheEnd, ManualDDP

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Pipeline(ManualDDP):
    """GPipe (arXiv 1811.06965), or 1F1B (arXiv 1806.03377), which holds fewer activations; the same gradients.

    Args:
        stages: processes that hold one copy of the network between them; further copies share the batch.
        micro_batches: into which the images of a forward pass are cut.
        schedule: gpipe or 1f1b.
        layers: how many each stage has; None: as even as possible by measured times.
        options: of ManualDDP.
    """

    def __init__(
        self, stages: int, micro_batches: int = 8, schedule: str = "1f1b", layers: list[int] | None = None, **options
    ):
        super().__init__(**options)
        if type(stages) is not int or stages < 1:
            raise ValueError(f"strategy.stages={stages} must be a whole number: of processes that share a network")
        if schedule not in SCHEDULES:
            raise ValueError(f"strategy.schedule={schedule} is unknown; it may be {' or '.join(SCHEDULES)}")
        if micro_batches < 1:
            raise ValueError(f"strategy.micro_batches={micro_batches} must be at least 1")
        if layers is not None and (len(layers) != stages or min(layers) < 1):
            raise ValueError(f"strategy.layers={list(layers)} must give each of the {stages} stages at least one layer")
        self.per_copy, self.micro_batches, self.schedule, self.layers = stages, micro_batches, schedule, layers
        self.engine = _Stages(self)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        networks = self.lightning_module.parallel_networks()
        for name, network in networks.items():
            if not isinstance(network, Layered) or len(networks) > 1:
                raise ValueError(
                    f"strategy=pipeline is for networks made of layers, such as model=ddn; the {name} is none: use "
                    f"strategy=fsdp"
                )
            self._check(network)
        self.copy = self._copies()[self.global_rank // self.per_copy]
        for network in networks.values():
            self.engine.place(network, self._cut(network))

    def on_validation_start(self) -> None:
        """Samples need all layers; averages have been swapped in where they are kept."""
        for network in self.lightning_module.parallel_networks().values():
            self.engine.fetch(network)

    def _copies(self) -> list[dist.ProcessGroup]:
        firsts = range(0, self.world_size, self.per_copy)
        return [dist.new_group(list(range(first, first + self.per_copy)), self._timeout) for first in firsts]

    def _check(self, network: Layered) -> None:
        count = len(network.layers())
        if self.per_copy > count:
            raise ValueError(f"strategy.stages={self.per_copy} is more than the network's {count} layers; lower it")
        if self.layers is not None and sum(self.layers) != count:
            raise ValueError(f"strategy.layers={list(self.layers)} must add up to the network's {count} layers")
        if (images := self._images()) % self.micro_batches:
            raise ValueError(
                f"strategy.micro_batches={self.micro_batches} does not divide the {images} images of a forward pass; "
                f"choose a divisor, or change batch or micro_batch"
            )

    def _images(self) -> int:
        """Images of one forward pass."""
        module = self.lightning_module
        return module.micro_batch or module.images_per_batch // (self.world_size // self.per_copy)

    def _cut(self, network: Layered) -> list[range]:
        """The layers of each stage, and a line that says how evenly they share the work."""
        data, images = self.lightning_module.trainer.datamodule, self._images() // self.micro_batches
        shape = images, data.channels, data.resolution, data.resolution
        seconds = self.broadcast(layer_seconds(network, next(network.parameters()).new_zeros(shape)))
        ends = list(accumulate(self.layers)) if self.layers else even_ends(seconds, self.per_copy)
        stages = [range(first, last) for first, last in pairwise([0, *ends])]
        shares = [sum(seconds[n] for n in stage) / sum(seconds) for stage in stages]
        if self.global_rank == 0:
            print(
                f"pipeline: stages of {', '.join(str(len(stage)) for stage in stages)} layers take "
                f"{', '.join(f'{share:.0%}' for share in shares)} of the time; with {self.micro_batches} micro-batches "
                f"processes wait {bubble(shares, self.micro_batches):.0%} of it",
                flush=True,
            )
        return stages


class _Stages(AtTheEnd):
    strategy: Pipeline

    def place(self, network: Layered, stages: list[range]) -> None:
        """This process trains its own stage from now on."""
        layers = network.layers()
        self.owner = {p: n for n, stage in enumerate(stages) for i in stage for m in layers[i] for p in m.parameters()}
        assert len(self.owner) == len(list(network.parameters())), "every parameter belongs to a layer"
        self.me = dist.get_rank(self.strategy.copy)
        network.forward = _Pipelined(network, stages, self.strategy)

    def fetch(self, network: nn.Module) -> None:
        """The weights of all stages, from where they are trained."""
        for parameter in network.parameters():
            self._from_owner(parameter, parameter.data)

    def _from_owner(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, group=self.strategy.copy, group_src=self.owner[parameter])
        return tensor

    def norm(self, gradients: list[Tensor]) -> Tensor:
        square = super().norm(gradients).square()
        dist.all_reduce(square, group=self.strategy.copy)
        return square.sqrt()

    def moments(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict:
        return optimizer.state[parameter] if self.trains(parameter) else {}

    def trains(self, parameter: nn.Parameter) -> bool:
        return self.owner[parameter] == self.me

    def alike(self, parameter: nn.Parameter) -> bool:
        return False

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        for network in module.parallel_networks().values():
            self.fetch(network)
        return super().weights(module)

    def together(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        return self._from_owner(parameter, part.clone())

    def optimizer_state(self, network: nn.Module, optimizer: Optimizer) -> dict[str, dict]:
        mine = {n: optimizer.state[p] for n, p in network.named_parameters() if self.trains(p)}
        parts = [None] * self.strategy.per_copy
        dist.all_gather_object(parts, _on_cpu(mine), group=self.strategy.copy)
        together = {name: state for part in parts for name, state in part.items()}
        return {name: together[name] for name, _ in network.named_parameters()}

    def load_optimizer(self, network: nn.Module, optimizer: Optimizer, state: dict[str, dict]) -> None:
        super().load_optimizer(network, optimizer, state)
        for parameter in network.parameters():
            if not self.trains(parameter):
                optimizer.state.pop(parameter, None)


class _Pipelined:
    """In the place of a network's forward: all processes of a copy call it with the same images.

    torch's schedules run forward and backward passes together, so gradients are there before the loss is known to the
    caller: they are those of the layers' sum, and wait for the backward pass, which scales them.
    """

    def __init__(self, network: Layered, stages: list[range], strategy: Pipeline):
        self.strategy, self.stages = strategy, stages
        self.mine = stages[dist.get_rank(strategy.copy)]
        self.stage = _Stage(network, self.mine, last=self.mine is stages[-1])
        self.parameters = [p for p in network.parameters() if strategy.engine.trains(p)]
        self.schedules: dict[tuple, object] = {}  # by what shapes depend on

    def __call__(self, target: Tensor, *inputs: Tensor) -> list:
        assert torch.is_grad_enabled(), "without gradients there is nothing to pipeline"
        strategy, number = self.strategy, dist.get_rank(self.strategy.copy)
        key = len(target), torch.is_autocast_enabled(target.device.type)
        if key not in self.schedules:
            stage = PipelineStage(self.stage, number, len(self.stages), target.device, group=strategy.copy)
            self.schedules[key] = SCHEDULES[strategy.schedule](
                stage, strategy.micro_batches, loss_fn=lambda losses, _: losses.mean(), scale_grads=False
            )
        before = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.stage.seen.clear()
        last = {"target": target} if self.mine is self.stages[-1] else {}
        self.schedules[key].step(images=target, **{f"input{n}": x for n, x in enumerate(inputs)}, **last)
        gradients = [p.grad for p in self.parameters]  # sums over the micro-batches
        torch._foreach_div_([g for g in gradients if g is not None], strategy.micro_batches)
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return self._entries(gradients)

    def _entries(self, gradients: list[Tensor]) -> list:
        """One for every layer: of this process's own all there is, of the others' the loss alone."""
        seen = self.stage.seen[-self.strategy.micro_batches :]  # before them, passes that only look for shapes
        own = [type(entries[0])(*_joined(entries)) for entries in zip(*seen, strict=True)]
        losses = own[0].loss.new_zeros(self.stages[-1].stop)
        losses[self.mine.start : self.mine.stop] = torch.stack([entry.loss for entry in own])
        dist.all_reduce(losses, group=self.strategy.copy)
        losses = _Waiting.apply(losses, gradients, *self.parameters)
        entries = [own[n - self.mine.start] if n in self.mine else type(own[0])(None) for n in range(len(losses))]
        return [entry._replace(loss=loss) for entry, loss in zip(entries, losses, strict=True)]


class _Stage(nn.Module):
    """Some layers, with the sum of all losses so far handed on beside the rest: (b,) with the same in each place."""

    def __init__(self, network: Layered, layers: range, last: bool):
        super().__init__()
        self.__dict__["network"] = network  # not a child: its parameters are the module's already
        self.layers, self.last, self.seen = layers, last, []

    def forward(self, *handed: Tensor, images: Tensor, **inputs: Tensor):
        if not handed:
            handed = (*self.network.begin(len(images)), images.new_zeros(len(images)))
        *carried, loss = [_ContiguousGradient.apply(x) for x in handed]
        carried, entries = self.network.run(self.layers, carried, images, *inputs.values())
        self.seen.append([type(e)(*(x if x is None else x.detach() for x in e)) for e in entries])
        loss = loss + sum(entry.loss for entry in entries).to(loss.dtype)
        return loss if self.last else tuple(x.contiguous() for x in (*carried, loss))


class _ContiguousGradient(torch.autograd.Function):
    """The identity; messages between processes have to be contiguous, and gradients of means are not."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class _Waiting(torch.autograd.Function):
    """Losses (layers,) whose parameters' gradients, those of their sum, are known already."""

    @staticmethod
    def forward(ctx, losses: Tensor, gradients: list[Tensor | None], *parameters: nn.Parameter) -> Tensor:
        ctx.gradients = gradients
        return losses.clone()

    @staticmethod
    def backward(ctx, weights: Tensor):
        assert torch.equal(weights, weights[:1].expand_as(weights)), "all layers must count alike"
        scaled = [None if g is None else g.mul_(weights[0].to(g.dtype)) for g in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def layer_seconds(network: Layered, images: Tensor, repeats: int = 3) -> list[float]:
    """Seconds of a forward and backward pass through each layer, the best of some tries."""
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    found, carried = [], network.begin(len(images))
    for layer in range(len(network.layers())):
        tries = []
        for _ in range(repeats):
            started = _now(images)
            with torch.enable_grad():
                after, entries = network.run(range(layer, layer + 1), carried, images, labels)
                entries[0].loss.backward()
            tries.append(_now(images) - started)
        carried = tuple(x.detach() for x in after)
        found.append(min(tries))
    network.zero_grad(set_to_none=True)
    return found


def even_ends(seconds: list[float], stages: int) -> list[int]:
    """Where stages end, in numbers of layers, so that the slowest is as fast as possible."""
    sums = [0.0, *accumulate(seconds)]
    best = [[n] for n in range(len(sums))]  # ends of the stages, of the first n layers
    cost = sums
    for _ in range(1, stages):
        costs, ends = cost[:], best[:]
        for n in range(1, len(sums)):
            tries = [(max(cost[m], sums[n] - sums[m]), m) for m in range(1, n)]
            costs[n], m = min(tries, default=(float("inf"), 0))
            ends[n] = [*best[m], n] if m else []
        cost, best = costs, ends
    return best[-1]


def bubble(shares: list[float], micro_batches: int) -> float:
    """The share of all processes' time that is spent waiting: stages' shares of the work, which add up to 1, and how
    many micro-batches follow each other through them (GPipe, section 2.3)."""
    stages = len(shares)
    return 1 - micro_batches * sum(shares) / (stages * (micro_batches + stages - 1) * max(shares))


def _joined(entries: tuple) -> list[Tensor | None]:
    """The micro-batches' values of one layer as those of all images: losses averaged, the rest one after the other."""
    return [
        None if parts[0] is None else torch.stack(parts).mean(0) if parts[0].dim() == 0 else torch.cat(parts)
        for parts in zip(*entries, strict=True)
    ]


def _on_cpu(states: dict[str, dict]) -> dict[str, dict]:
    return {n: {k: v.cpu() if torch.is_tensor(v) else v for k, v in state.items()} for n, state in states.items()}


def _now(tensor: Tensor) -> float:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
