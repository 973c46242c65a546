"""The reply to the link's call `samples`."""

from __future__ import annotations

from dataclasses import dataclass

from eplane.errors import MessageError
from eplane.fields import Fields
from eplane.routing import RankSample
from runtime.link.messages import Json


@dataclass(frozen=True, slots=True)
class SamplesReply:
    """The routing samples of the windows that were asked for and are still kept, oldest first.

    `refused`: one sentence for each that can not be read; it costs neither the others nor the link.
    """

    world: str
    samples: tuple[RankSample, ...]
    refused: tuple[str, ...] = ()

    def to_json(self) -> Json:
        return {"world": self.world, "samples": [one.to_json() for one in self.samples]}

    @staticmethod
    def from_json(value: object) -> SamplesReply:
        fields = Fields(value, "samples", MessageError)
        good: list[RankSample] = []
        bad: list[str] = []
        for at, item in enumerate(fields.items("samples", most=4096)):
            try:
                good.append(RankSample.read(Fields(item, f"samples[{at}]", MessageError)))
            except MessageError as error:
                bad.append(str(error))
        return SamplesReply(fields.hexes("world", 16), tuple(good), tuple(bad))
