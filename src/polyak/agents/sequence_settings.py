"""Settings of off-policy actor-critics whose networks may be recurrent."""

from typing import ClassVar

from polyak.core.struct import struct


@struct(kw_only=True)
class SequenceSettings:
    """The replay of an agent that learns from transitions, or from sequences with recurrent networks.

    Attributes:
        replay: a `UniformReplay`, a `PrioritizedReplay`, a `HindsightReplay`, or a `polyak.replay.Replay` of your own; a
            `SequenceReplay` with a recurrent actor, such as `LSTM(head=Actor())`, beside which critics may be recurrent too,
            `LSTM(head=Critics())`, with a cell of their own (Ni et al. 2022, arXiv:2110.05038); `critics=None` takes the
            actor's kind of cell, of the same sizes, before the default critics. It stores the recurrent states of both, with
            which all networks, targets too, begin each sequence; no gradient flows into the first `burn_in` steps (R2D2,
            Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning").
    """

    takes_sequences: ClassVar[bool] = True
