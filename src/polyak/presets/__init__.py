"""Presets: tuned settings by algorithm and environment, as plain Python."""

from polyak.presets import (
    a2c,
    a3c,
    bootstrapped_dqn,
    bro,
    c51,
    cql,
    crossq,
    ddpg,
    discrete_cql,
    dqn,
    droq,
    fast_td3,
    flash_sac,
    impala,
    iqn,
    naf,
    ppo,
    ppo_kl,
    pqn,
    qrdqn,
    qt_opt,
    rainbow,
    redq,
    reinforce,
    rnd_dqn,
    sac,
    simbav2,
    sr_sac,
    td3,
    td3_bc,
    tqc,
    xqc,
)
from polyak.presets.preset import Preset

__all__ = ["DEFAULT", "PRESETS", "Preset", "preset"]

PRESETS: dict[tuple[str, str], Preset] = {
    (algorithm, env_id): preset
    for algorithm, presets in (
        ("a2c", a2c.PRESETS),
        ("a3c", a3c.PRESETS),
        ("bootstrapped_dqn", bootstrapped_dqn.PRESETS),
        ("bro", bro.PRESETS),
        ("c51", c51.PRESETS),
        ("crossq", crossq.PRESETS),
        ("ddpg", ddpg.PRESETS),
        ("dqn", dqn.PRESETS),
        ("droq", droq.PRESETS),
        ("fast_td3", fast_td3.PRESETS),
        ("flash_sac", flash_sac.PRESETS),
        ("impala", impala.PRESETS),
        ("iqn", iqn.PRESETS),
        ("naf", naf.PRESETS),
        ("ppo", ppo.PRESETS),
        ("ppo_kl", ppo_kl.PRESETS),
        ("pqn", pqn.PRESETS),
        ("qrdqn", qrdqn.PRESETS),
        ("qt_opt", qt_opt.PRESETS),
        ("rainbow", rainbow.PRESETS),
        ("redq", redq.PRESETS),
        ("reinforce", reinforce.PRESETS),
        ("rnd_dqn", rnd_dqn.PRESETS),
        ("sac", sac.PRESETS),
        ("simbav2", simbav2.PRESETS),
        ("sr_sac", sr_sac.PRESETS),
        ("td3", td3.PRESETS),
        ("tqc", tqc.PRESETS),
        ("xqc", xqc.PRESETS),
    )
    for env_id, preset in presets.items()
}

DEFAULT = Preset(1_000_000, 8, {}, "the algorithm's own")

DEFAULTS: dict[str, Preset] = {
    "a3c": a3c.DEFAULT,
    "bro": bro.DEFAULT,
    "cql": cql.DEFAULT,
    "discrete_cql": discrete_cql.DEFAULT,
    "droq": droq.DEFAULT,
    "fast_td3": fast_td3.DEFAULT,
    "flash_sac": flash_sac.DEFAULT,
    "rainbow": rainbow.DEFAULT,
    "redq": redq.DEFAULT,
    "simbav2": simbav2.DEFAULT,
    "sr_sac": sr_sac.DEFAULT,
    "td3_bc": td3_bc.DEFAULT,
}
"""Settings for environments without a preset: of algorithms that are settings of another one, or the paper's."""


def preset(algorithm: str, env_id: str) -> Preset:
    """The preset of an algorithm and environment, else the algorithm's defaults.

    Equal tasks share a preset: `jax/CartPole-v1` and `CartPole-v1`, `MinAtar/Breakout-v1` and `gymnax/Breakout-MinAtar`. All
    Atari games share one preset. A `module:` before the name is ignored.
    """
    algorithm, name = algorithm.lower(), env_id.rpartition(":")[2].removeprefix("jax/")
    if name.startswith("ALE/"):
        name = "ALE/..."
    elif name.startswith("MinAtar/"):
        name = f"gymnax/{name.removeprefix('MinAtar/').rpartition('-')[0]}-MinAtar"
    return PRESETS.get((algorithm, name), DEFAULTS.get(algorithm, DEFAULT))
