"""The preset of discrete conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779): DQN with CQL(H)."""

from polyak.presets.preset import Preset

DEFAULT = Preset(1_000_000, 8, {"cql_weight": 1.0}, "DQN with the term of CQL(H), learned from a data set")
