"""A store's router with the heads of experts that were added later: which experts a noisy image is sent to."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from src import store as stores
from src.contract import require_same
from src.flow import TIME_SCALE
from src.images import at_least_float32
from src.routing import Calibration, Draw, Strategy, weights

NEEDS = ("contract", "network", "counts", "calibration")  # of a card


class Gate:
    """Reads router and heads once, and weights experts by them.

    `counts` are the images of each expert's cluster, `contract` that of the router. Raises ValueError where there is no
    router, or a head that does not fit.

    Args:
        store: a folder, or any URL of fsspec's.
        router: its folder in the store.
        device: that they are on.
    """

    def __init__(self, store: str, router: str, device: torch.device | str):
        self.store, self.device = store, device
        card, self.network, self.calibration = self._read(router, f"experiment=paris_{router}")
        self.contract: Mapping[str, Any] = card["contract"]
        self.counts: list[float] = list(card["counts"])
        known = {f"heads/{k}" for k in range(len(self.counts))}
        for kind in stores.kinds(store, "heads"):
            if kind in known:
                print(f"{kind} is not used: {router} knows that expert itself")
        self.heads = [self._head(kind) for kind in stores.kinds(store, "heads") if kind not in known]

    def weights(
        self,
        x: Tensor,
        t: Tensor,
        labels: Tensor | None,
        strategy: Strategy,
        living: list[bool],
        draw: Draw | None = None,
        cluster: Tensor | None = None,
    ) -> Tensor:
        """What each expert counts for each sample, (n, experts), as src.routing.weights gives it."""
        logits = _shown(self.network, x, t, labels)
        added = [calibration.log_probabilities(_shown(head, x, t, labels), t) for head, calibration in self.heads]
        alive = torch.tensor(living, device=x.device)
        return weights(logits, t, strategy, self.calibration, added, alive, draw, cluster)

    def _head(self, kind: str) -> tuple[nn.Module, Calibration]:
        card, network, calibration = self._read(kind, f"experiment=paris_head expert={kind.rpartition('/')[2]}")
        require_same(self.contract, card["contract"], kind)
        if card["k"] != len(self.counts):
            raise ValueError(f"{kind} tells expert {card['k']} from the others; that of {len(self.counts)} is missing")
        old, new = card["counts"]
        self.counts.append(sum(self.counts) * new / old)
        return network, calibration

    def _read(self, kind: str, made_by: str) -> tuple[dict[str, Any], nn.Module, Calibration]:
        card, rejected = stores.newest(self.store, kind, NEEDS)
        print("".join(f"{line}\n" for line in rejected), end="")
        if card is None:
            raise ValueError(f"{self.store} has no {kind} that can be used; train it: python train.py {made_by}")
        network = stores.network_of(self.store, card).to(self.device)
        if len(card["counts"]) != network.clusters or min(card["counts"]) < 1:
            raise ValueError(
                f"{kind} counts {card['counts']} images for its {network.clusters} clusters; train it again"
            )
        return card, network, Calibration(**card["calibration"])


def _shown(network: nn.Module, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
    return at_least_float32(network(x, TIME_SCALE * t, known_labels(network, x, labels)))


def known_labels(network: nn.Module, x: Tensor, labels: Tensor | None) -> Tensor | None:
    """What a network is told of the labels of x: them, that there are none (the null class), or nothing."""
    if not network.classes:
        return None
    if labels is None:
        return torch.full((len(x),), network.classes, device=x.device)
    return labels
