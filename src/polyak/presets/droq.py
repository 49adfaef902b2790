"""Presets of DroQ (Hiraoka et al. 2022, arXiv:2110.02034): REDQ's SAC with two critics with dropout, by environment."""

from polyak.presets.preset import Preset
from polyak.presets.redq import LENGTHS_AND_ENTROPIES, REDQ

# fmt: off
CRITICS = {"dropout": 0.01, "norm": "layer"}
DROQ = {**REDQ, "critics": CRITICS}
PENDULUM = {
    **DROQ, "actor": {"hidden": (64, 64)}, "critics": {**CRITICS, "hidden": (64, 64)}, "learning_starts": 200,
    "replay": {"capacity": 20_000},
}
# fmt: on

# The authors give the rates with which REDQ's code, whose numbers these presets have, reproduces their results.
DROPOUT = {"Hopper-v5": 0.0001, "Walker2d-v5": 0.005, "Ant-v5": 0.01, "Humanoid-v5": 0.1}
AUTHORS = "the authors' code, of github.com/TakuyaHiraoka"

DEFAULT = Preset(300_000, 1, DROQ, "DroQ: SAC with dropout and layer normalization, and twenty gradient steps a step")

PRESETS: dict[str, Preset] = {
    "Pendulum-v1": Preset(5_000, 1, PENDULUM, "polyak's preset"),
    **{
        name: Preset(
            LENGTHS_AND_ENTROPIES[name][0],
            1,
            {**DROQ, "critics": {**CRITICS, "dropout": rate}, "target_entropy": LENGTHS_AND_ENTROPIES[name][1]},
            AUTHORS,
        )
        for name, rate in DROPOUT.items()
    },
}
