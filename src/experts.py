"""The experts that lie in a store: who lives, what each says, and no more of them in memory than asked for."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from src import store as stores
from src.contract import require_same
from src.gate import known_labels
from src.objectives import Objective, Velocity


class Gone(Exception):
    """An expert's file could no longer be read when it was needed."""


class Experts:
    """Experts 0 to `count` - 1 of a store, which come and go while they are asked.

    An expert lives while the store has a card of it whose weights have the card's hash; a damaged one falls back on its
    older card. One with another contract is refused, whenever it turns up.

    Args:
        store: a folder, or any URL of fsspec's.
        contract: what theirs have to be.
        count: how many there could be.
        devices: expert k is on number k of these, which are gone through again and again.
        in_memory: networks that are kept; the least recently asked makes room and is read again when needed.
        check_seconds: the store is looked at again after so long; 0: whenever somebody asks who lives.
        say: told in one line what changed.
    """

    def __init__(
        self,
        store: str,
        contract: Mapping[str, Any],
        count: int,
        devices: Sequence[torch.device | str] = ("cpu",),
        in_memory: int = 8,
        check_seconds: float = 1.0,
        say: Callable[[str], None] = print,
    ):
        if in_memory < 1:
            raise ValueError(f"in_memory={in_memory}, but one expert has to be in memory to be asked")
        self.store, self.contract, self.devices = store, contract, [torch.device(d) for d in devices]
        self.in_memory, self.check_seconds, self.say = in_memory, check_seconds, say
        self.guided = False  # whether all of them have to know images without their label
        self.cards: list[dict[str, Any] | None] = [None] * count
        self._states: list[str | None] = [None] * count
        self._networks: OrderedDict[int, tuple[nn.Module, Objective]] = OrderedDict()
        self.look()

    @property
    def living(self) -> list[bool]:
        """Who can be asked, as of now."""
        if time.monotonic() - self._looked >= self.check_seconds:
            self.look()
        return [card is not None for card in self.cards]

    def look(self) -> None:
        """See what has changed in the store. Raises ValueError for an expert of another contract."""
        self._looked = time.monotonic()
        for k, before in enumerate(self.cards):
            kind = f"experts/{k}"
            try:
                state = stores.state(self.store, kind)
                if state == self._states[k]:
                    continue
                card, rejected = stores.newest(self.store, kind, ("contract", "network"))
            except OSError as error:
                state, card, rejected = None, None, [f"{kind} cannot be read: {error}"]
            first, self._states[k] = self._states[k] is None, state
            for line in rejected:
                self.say(line)
            if card is not None:
                require_same(self.contract, card["contract"], kind)
                self._require_guidable(card)
            if card is None and (first or before is not None):
                self.say(f"{kind} is not there: going on without it")
            elif card is not None and not first and card != before:
                self.say(f"{kind} is now the one after {card['images']} images")
            if card is None or card != before:
                self._networks.pop(k, None)
            self.cards[k] = card

    def require_guidance(self) -> None:
        """From now on, raise ValueError for an expert that never saw images without their label to be guided by."""
        self.guided = True
        for card in self.cards:
            if card is not None:
                self._require_guidable(card)

    def _require_guidable(self, card: dict[str, Any]) -> None:
        if self.guided and not (card["network"].get("classes") and card.get("label_dropout")):
            raise ValueError(
                f"{card['kind']} was not trained both with labels and without (network.classes, label_dropout), so "
                "that there is nothing to guide by; set cfg_scale=1"
            )

    def ask(self, k: int, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Expert k's velocity at x (n, c, h, w), times t (n,) in [0, 1] and labels (n,), wherever these are.

        Raises Gone where its file has gone bad since it was looked at.
        """
        network, objective = self._loaded(k)
        device = self.devices[k % len(self.devices)]
        x_there, labels = x.to(device), None if labels is None else labels.to(device)
        known = known_labels(network, x_there, labels)
        return objective.velocity(lambda shown, time: network(shown, time, known), x_there, t.to(device)).to(x.device)

    def _loaded(self, k: int) -> tuple[nn.Module, Objective]:
        if k not in self._networks:
            while len(self._networks) >= self.in_memory:
                self._networks.popitem(last=False)
            card = self.cards[k]
            try:
                network = stores.network_of(self.store, card).to(self.devices[k % len(self.devices)])
                objective = stores.built(card["objective"]) if card.get("objective") else Velocity()
            except (OSError, ValueError) as error:
                self.look()
                if self.cards[k] is card:
                    self.say(f"{card['kind']} is not there: {error}")
                    self.cards[k] = None
                raise Gone from error
            self._networks[k] = network, objective
        self._networks.move_to_end(k)
        return self._networks[k]
