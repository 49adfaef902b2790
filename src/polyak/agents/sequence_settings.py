"""Settings of off-policy actor-critics whose networks may be recurrent."""

from functools import partial
from typing import ClassVar

from polyak.core.struct import setting, struct
from polyak.replay.replay import Replay, check_replay
from polyak.replay.uniform import UniformReplay


@struct(kw_only=True)
class SequenceSettings:
    """The replay of an agent that learns from transitions, or from sequences with recurrent networks.

    Attributes:
        replay: a `UniformReplay`, a `PrioritizedReplay`, a `HindsightReplay`, or a `polyak.replay.Replay` of your own; a
            `SequenceReplay` with a recurrent actor, such as `LSTM(head=Actor())`, beside which critics may be recurrent too,
            `LSTM(head=Critics())`. It stores the recurrent states of both, with which all networks, targets too, begin each
            sequence. No gradient flows into the first `burn_in` steps (Ni et al. 2022, arXiv:2110.05038; R2D2).
    """

    takes_sequences: ClassVar[bool] = True

    replay: Replay = setting(default=UniformReplay(1_000_000), check=partial(check_replay, sequences=True))
