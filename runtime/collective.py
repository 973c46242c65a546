"""What the ranks of a world need of each other in a step: one kind of exchange, over torch.distributed or alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from eplane.errors import WorldEnded


class Exchange(Protocol):
    """`all_to_all(send, send_rows, receive_rows)`: row blocks of `send [sum(send_rows), ...]` go to ranks 0, 1, ...

    Returns `[sum(receive_rows), ...]`, the blocks in the order of the ranks they come from. Engine thread only.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_to_all(self, send: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor: ...


class Alone:
    """A world of one rank: what it sends is what it receives."""

    rank = 0
    ranks = 1

    def all_to_all(self, send: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        return send


class Together:
    """The default process group. A peer that is gone or silent past the group's time-out ends the world."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def all_to_all(self, send: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        received = torch.empty((sum(receive_rows), *send.shape[1:]), dtype=send.dtype, device=send.device)
        try:
            dist.all_to_all_single(received, send, list(receive_rows), list(send_rows))
        except (RuntimeError, dist.DistError) as error:
            reason = str(error).partition(". This is typically")[0]  # Gloo goes on with general advice.
            raise WorldEnded(f"rank {self.rank} lost a peer in an exchange: {reason}") from error
        return received
