"""Every flag, given wrongly: exit code 2, one message that names it, and nothing on the disk."""

import dataclasses
import re
import typing

import docstring_parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyak import envs
from polyak.agents import AGENTS, action_scaling_of, agent_class
from polyak.cli import main
from polyak.cli.agent_flags import agent_flags
from polyak.cli.change_parts import change_parts
from polyak.cli.evaluate import EvaluateFlags
from polyak.cli.export import ExportFlags
from polyak.cli.flags import TrainFlags, UsageError, parse, parse_settings
from polyak.cli.network_flags import Activation, NetworkFlags
from polyak.cli.pack import PackFlags
from polyak.cli.plot import PlotFlags
from polyak.cli.record import RecordFlags
from polyak.cli.replay_flags import ReplayFlags
from polyak.cli.report import ReportFlags
from polyak.cli.resume import ResumeFlags
from polyak.cli.study import StudyFlags
from polyak.cli.user_flags import UserFlags
from polyak.networks.layers import ACTIVATIONS
from polyak.ops.schedules import Linear
from polyak.presets import preset
from polyak.presets.preset import LinearOverTraining, with_length
from polyak.train.new_training import intervals, make_agent
from polyak.train.settings import TrainSettings

ADVICE = "`polyak train ppo CartPole-v1 --help` shows the flags"
NOT_POSITIVE = ("0", "-1")
NOT_A_SHARE = ("-0.1", "1.5", "nan", "inf", "1e400")
NEGATIVE = ("-1", "nan", "inf")
ZERO_TOO = (*NEGATIVE, "0")
NO_FRACTION = ("linear:1:0.5:0", "linear:1:0.5:1.1", "linear:1:0.5:-0.5")
NO_SCHEDULE = (
    *(*NEGATIVE, "linear:", "linear:x", "linear:1:2:0.5:0.5", "cosine:1", "linear:nan", "linear:-1", "linear:1:0:nan"),
    *NO_FRACTION,
)

# What is of the right type and still wrong; every flag has its line.
OUT_OF_RANGE = {
    "actor-obs": ("state", "state state"),
    "critic-obs": ("state",),
    "env-steps": NOT_POSITIVE,
    "num-envs": NOT_POSITIVE,
    "seed": ("-1", "4294967296"),
    "seeds": NOT_POSITIVE,
    "run-dir": (),
    "preset": ("none.toml",),
    "loop": ("compiled", "distributed", "asynchronous"),
    "workers": (*NOT_POSITIVE, "3"),
    "lag": ("-1", "1"),
    "shared-optimizer": ("no", "maybe"),
    "max-staleness": ("-1", "3"),
    "ray-address": ("auto",),
    "data": ("none.npz", "none.csv"),
    "data-share": ("0", "1.5", "0.7"),
    "replay-on": ("disk", "host"),
    "worker-timeout": (*ZERO_TOO, "59"),
    "worker-start-timeout": (*ZERO_TOO, "299"),
    "worker-restarts": ("-1", "2147483648", "99"),
    "on-env-error": ("ignore", "restart"),
    "min-workers": (*NOT_POSITIVE, "2"),
    "learners": (*NOT_POSITIVE, "2"),
    "devices": (*NOT_POSITIVE, "3"),
    "eval-episodes": ("-1", "1.5", "many"),
    "eval-max-steps": NOT_POSITIVE,
    "report-every": NOT_POSITIVE,
    "checkpoint-every": NOT_POSITIVE,
    "eval-every": NOT_POSITIVE,
    "video-every": NOT_POSITIVE,
    "track": ("comet",),
    "checkpoint-replay": ("maybe",),
    "agent": (),
    "env": (),
    "wrapper": ("nowhere", "nowhere:Wrapper"),
    "network": ("transformer",),
    "action-scaling": ("rescaled",),
    "compilation-cache": ("1",),
    "env-kwargs": ("frameskip", "frameskip=", "=4", "frame skip=4", "frameskip=true"),
    "num-steps": NOT_POSITIVE,
    "num-epochs": NOT_POSITIVE,
    "num-minibatches": (*NOT_POSITIVE, "3"),
    "learning-rate": NO_SCHEDULE,
    "gamma": NOT_A_SHARE,
    "gae-lambda": NOT_A_SHARE,
    "clip-range": NO_SCHEDULE,
    "clip-range-vf": ZERO_TOO,
    "ent-coef": NEGATIVE,
    "vf-coef": NEGATIVE,
    "max-grad-norm": ZERO_TOO,
    "target-kl": ZERO_TOO,
    "advantages": ("td",),
    "value-targets": ("gae",),
    "values-when": ("later",),
    "recompute-values": ("1",),
    "clip-log-prob": ZERO_TOO,
    "normalize-advantage": ("no",),
    "normalize-obs": ("1",),
    "clip-obs": ZERO_TOO,
    "normalize-reward": ("true",),
    "clip-reward": ZERO_TOO,
    "histograms": ("1",),
    "sde-sample-freq": NOT_POSITIVE,
    "squash": ("1",),
    "adam-b1": NOT_A_SHARE,
    "adam-eps": ZERO_TOO,
    "max-skipped-updates": NOT_POSITIVE,
    "ema-tau": NOT_A_SHARE,
    "microbatch-size": (*NOT_POSITIVE, "3"),
    "hidden": ("0", "-3", "64 0"),
    "activation": ("sigmoid",),
    "shared-torso": ("yes",),
    "squash-mean": ("yes",),
    "log-std": ("nan", "inf"),
    "value-hidden": ("0", "64 0"),
    "value-activation": ("sigmoid",),
    "num-critics": NOT_POSITIVE,
    "norm": ("yes",),
    "residual": ("yes",),
    "dueling": ("yes",),
    "noisy": ("yes",),
    "dropout": NOT_A_SHARE,
}
WIDTHS = ("hidden", "value-hidden")
NO_NUMBER = ("abc", "1,5", "0x10", "1e", "true")
NO_INTEGER = (*NO_NUMBER, "1.5", "1e3", "nan", "inf")


def flags_of(kind):
    return {field.name.replace("_", "-"): hint for field, hint in zip(dataclasses.fields(kind), hints_of(kind), strict=True)}


def hints_of(kind):
    hints = typing.get_type_hints(kind)
    return [hints[field.name] for field in dataclasses.fields(kind)]


FLAGS = flags_of(TrainFlags) | flags_of(UserFlags) | flags_of(agent_flags(AGENTS["ppo"], {})) | flags_of(NetworkFlags)


A_NETWORK = {
    "network": "mlp", "hidden": (8,), "activation": "gelu", "shared_torso": True, "log_std": -1.0, "squash_mean": True,
    "value_hidden": (8,), "value_activation": "gelu", "num_critics": 1, "norm": "layer", "dueling": True, "noisy": True,
    "dropout": 0.1, "residual": "pre_norm",
}  # fmt: skip


@pytest.mark.parametrize("algorithm", AGENTS)
def test_help_lists_the_network_flags_that_an_algorithm_takes(algorithm, command):
    code, text, _ = command(f"train {algorithm} --help")
    assert code == 0
    is_for_boxes = "epsilon" not in agent_class(algorithm).__dataclass_fields__
    env_id = "jax/Pendulum-v1" if is_for_boxes else "jax/CartPole-v1"
    agent = make_agent(algorithm, envs.make(env_id, action_scaling=action_scaling_of(algorithm)).spec, None, 100, None)
    if algorithm == "td3":
        # Its actor has a standard deviation then.
        agent = agent_class("td3")(agent.spec, sde_sample_freq=4)
    has_replay, has_sequences = hasattr(agent, "replay"), getattr(agent, "takes_sequences", False)
    for field in dataclasses.fields(NetworkFlags):
        is_shown = f" --{field.name.replace('_', '-')} " in text.replace(",", " ")
        # Rainbow explores by nothing else, and the blocks of SimbaV2 and FlashSAC have no other normalization and no dropout.
        plain = {"residual": "post_norm"}
        others = {"rainbow": {"noisy": True}, "simbav2": plain, "flash_sac": plain}.get(algorithm, {})
        # NAF has a shared torso, and accepts no other.
        value = False if (algorithm, field.name) == ("naf", "shared_torso") else A_NETWORK[field.name]
        changed = agent
        if has_sequences and hasattr(agent, "critics") and field.name == "network":
            # No noise is stored with sequences, and recurrent critics have no dropout.
            value, others = "gru", {"dropout": 0.0} if algorithm == "droq" else {}
            unstored = {"ddpg": {"exploration": "gaussian"}, "td3": {"sde_sample_freq": None, "actor": None}}
            changed = dataclasses.replace(agent, **unstored.get(algorithm, {}))
        try:
            change_parts(algorithm, changed, NetworkFlags(**{**others, field.name: value}), ReplayFlags(), 100)
        except (UsageError, ValueError):
            assert not is_shown, field.name
        else:
            assert is_shown, field.name
    for field in dataclasses.fields(ReplayFlags):
        is_shown = f" --{field.name.replace('_', '-')} " in text.replace(",", " ")
        assert is_shown == (has_sequences if field.name in ("sequence_length", "burn_in") else has_replay), field.name


def wrong_types(flag):
    if FLAGS[flag] is int or FLAGS[flag] == int | None or flag in WIDTHS:
        return NO_INTEGER
    return NO_NUMBER if flag not in ("run-dir", "loop", "action-scaling", "activation", "value-activation") else ()


def test_every_flag_has_wrong_values_in_the_table():
    assert set(OUT_OF_RANGE) == set(FLAGS)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_wrong_value_is_rejected_before_anything_is_created(flag, command, workdir):
    types, values = wrong_types(flag), OUT_OF_RANGE[flag]
    # All values for one flag of each kind, the first ones for the others.
    if flag not in ("num-envs", "gamma", "vf-coef", "learning-rate", "max-grad-norm", "hidden"):
        types, values = types[:1], values[:1] if values in (NOT_A_SHARE, NEGATIVE, ZERO_TOO, NO_SCHEDULE) else values
    for value in (*types, *values, None):
        switch = FLAGS[flag] in (bool, bool | None)
        if value is None and switch:
            continue  # It has no value.
        words = f"--{flag}" if value is None else f"--{flag} {value}"
        code, out, err = command("train ppo CartPole-v1", words)
        assert code == 2, words
        assert out == "", words
        assert "Traceback" not in err, words
        # A switch takes no value: the error names the value.
        assert value in err if switch else flag.replace("-", "_") in err.replace("-", "_"), (words, err)
        assert list(workdir.iterdir()) == [], words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--env-steps 1e5", "--env-steps: must be an integer, got '1e5'; write 100000"),
        ("--env-steps many", "--env-steps: must be an integer, got 'many'"),
        ("--gamma x", "--gamma: must be a number, got 'x'"),
        ("--learning-rate lin_1e-3", "must be a number or linear:START[:END[:FRACTION]], such as linear:0.001; got 'lin_1e-3'"),
        ("--workers 1e1", "must be an integer, got '1e1'; write 10"),
    ],
)
def test_a_number_that_cannot_be_read_says_how_to_write_it(words, said, command):
    code, out, err = command("train ppo CartPole-v1", words)
    assert (code, out) == (2, "")
    assert err.startswith("error: --") and err.endswith(f"{said}\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gama 0.9", f"unknown flag --gama; did you mean --gamma? {ADVICE}"),
        ("--agent.gamma 1", f"unknown flag --agent.gamma; did you mean --gamma? {ADVICE}"),
        ("--agent.lr 0.1", "in polyak --agent.lr is --learning-rate"),
        ("--xyzzy 3", f"unknown flag --xyzzy; {ADVICE}"),
        ("--gamma --seed 3", "--gamma needs a value"),
        ("--num-envs 8 9", "unexpected 9, as no flag takes it"),
        ("-n 8", "unexpected -n, 8, as no flag takes it"),
    ],
)
def test_words_that_are_no_flags_or_values_end_in_one_sentence(words, said, command):
    assert command("train ppo CartPole-v1", words) == (2, "", f"error: {said}\n")


def test_a_flag_that_must_be_set_is_named(command):
    assert command("pack run") == (2, "", "error: --output is missing\n")


@pytest.mark.parametrize(
    ("env_steps", "given", "wanted"),
    [
        (20_000, {}, (None, 2_000)),
        (10_000_000, {}, (None, 100_000)),
        (10_000_000, {"checkpoint_every": 20_000}, (20_000, 20_000)),
        (10_000_000, {"checkpoint_every": 500_000}, (None, 500_000)),
        (10_000, {"report_every": 50, "checkpoint_every": 90}, (50, 90)),
    ],
)
def test_reports_are_as_frequent_as_the_checkpoints_that_were_asked_for(env_steps, given, wanted):
    assert intervals("train", TrainSettings(env_steps=env_steps, **given), env_steps) == wanted


def test_checkpoints_between_reports_are_rejected(command, workdir):
    code, out, err = command("train ppo CartPole-v1 --report-every 100 --checkpoint-every 99")
    assert (code, out) == (2, "")
    assert "--checkpoint-every 99 must be --report-every 100 or more" in err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("gama 0.9", "--gamma"),
        ("learning-rat 1", "--learning-rate"),
        ("num-env 2", "--num-envs"),
        ("hiden 4", "--hidden"),
        ("no-normalise-obs", "did you mean --no-normalize-obs?"),
        ("num_env 2", "did you mean --num-envs?"),
    ],
)
def test_a_misspelt_flag_suggests_the_nearest(flag, nearest, command, workdir):
    code, out, err = command(f"train ppo CartPole-v1 --{flag}")
    assert (code, out) == (2, "")
    assert f"--{flag.split()[0]}" in err
    assert nearest in err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    "twice", ["--gamma 0.9 --gamma 0.9", "--num_envs 2 --num-envs=4", "--normalize-obs --no-normalize-obs"]
)
def test_a_repeated_flag_is_rejected(twice, command, workdir):
    code, _, err = command("train ppo CartPole-v1", twice)
    assert code == 2
    assert "is set more than once" in err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize("stray", ["8", "CartPole-v1", "-x", "-n 8"])
def test_unknown_arguments_are_rejected(stray, command, workdir):
    code, _, _ = command("train ppo CartPole-v1", stray)
    assert code == 2
    assert list(workdir.iterdir()) == []


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Two numbers."""

    whole: int = 1
    real: float = 1.0


@pytest.mark.parametrize(("text", "value"), [("3e-4", 3e-4), ("1_000", 1000.0), ("-2", -2.0), (".5", 0.5)])
def test_numbers_are_read_as_python_reads_them(text, value):
    assert parse(Numbers, ["--real", text], prog="", description="").real == value


def test_underscores_in_integers_are_read():
    assert parse(Numbers, ["--whole", "100_000"], prog="", description="").whole == 100_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.001", 0.001),
        ("linear:0.001", Linear(1e-3, 0.0, 500)),
        ("linear:0.1:0.05", Linear(0.1, 0.05, 500)),
        ("linear:1:0.05:0.16", Linear(1.0, 0.05, 80)),
    ],
)
def test_a_schedule_is_a_number_or_linear_over_the_training_or_its_first_part(text, value):
    flags = parse(agent_flags(AGENTS["ppo"], {}), ["--learning-rate", text], prog="", description="")
    assert with_length(flags.learning_rate, 500) == value


def test_help_writes_schedules_as_they_are_passed(capsys):
    schedules = {"learning_rate": LinearOverTraining(1e-3), "epsilon": LinearOverTraining(1.0, 0.05, fraction=0.16)}
    with pytest.raises(SystemExit):
        parse(agent_flags(AGENTS["dqn"], schedules), ["--help"], prog="", description="")
    out = " ".join(capsys.readouterr().out.split())
    assert "linear:START[:END[:FRACTION]]" in out
    assert "linear:0.001)" in out and "linear:1:0.05:0.16)" in out


@pytest.mark.parametrize("text", NO_FRACTION)
def test_a_fraction_of_the_training_is_above_0_and_at_most_1(text):
    with pytest.raises(UsageError, match="must be above 0 and at most 1"):
        parse(agent_flags(AGENTS["ppo"], {}), ["--learning-rate", text], prog="", description="")


def test_the_defaults_of_the_flags_are_the_presets():
    flags = parse(agent_flags(AGENTS["ppo"], preset("ppo", "CartPole-v1").values), [], prog="", description="")
    assert (flags.num_steps, flags.gamma, flags.learning_rate) == (32, 0.98, LinearOverTraining(1e-3))
    flags = parse(agent_flags(AGENTS["ppo"], {}), [], prog="", description="")
    assert (flags.num_steps, flags.gamma, flags.learning_rate) == (256, 0.99, 3e-4)


def test_every_field_of_the_agent_but_spec_and_objects_is_a_flag():
    fields = {field.name for field in dataclasses.fields(agent_class("ppo"))} - {"spec", "network", "optimizer"}
    assert {field.name for field in dataclasses.fields(agent_flags(AGENTS["ppo"], {}))} == fields


def test_activations_are_those_of_the_built_in_networks():
    assert typing.get_args(Activation) == tuple(ACTIVATIONS)


def test_help_shows_every_flag_with_what_it_means(command):
    code, out, _ = command("train ppo Pendulum-v1 --help")
    assert code == 0
    for flag in FLAGS.keys() - {"num-critics", "norm", "residual", "dueling", "noisy", "dropout"}:
        assert f"--{flag}" in out
    assert "discount per step. (default: 0.9)" in out
    assert "RL Baselines3 Zoo" in out


def test_help_names_the_critics_of_no_other_algorithm(command):
    text = " ".join(command("train qt_opt Pendulum-v1 --help")[1].replace("│", " ").split())
    assert "number of critics in the ensemble (default" in text and "from 0.4 to 1 over a million steps" in text


def test_help_works_before_an_environment_is_named(command):
    code, out, _ = command("train sac --help")
    assert code == 0
    assert out.startswith("usage: polyak train sac ENV") and "Train sac in ENV. Defaults: the algorithm's own." in out
    # Those of the agent, not of CartPole-v1's preset.
    flags = agent_flags(AGENTS["sac"], {})()
    assert f"transitions of a gradient step. (default: {flags.batch_size})" in " ".join(out.replace("│", " ").split())
    assert "Defaults: polyak's preset." in command("train sac CartPole-v1 --help")[1]


def test_a_repeated_flag_is_a_usage_error():
    with pytest.raises(UsageError, match="--whole is set more than once"):
        parse(Numbers, ["--whole", "1", "--whole", "2"], prog="", description="")


@pytest.mark.parametrize("word", ["a=nan", "a=inf", "a=-1e999", f"a={'9' * 5000}", "a", "a=true", "1=2"])
def test_a_setting_that_is_not_finite_is_rejected(word):
    with pytest.raises(UsageError, match="--env-kwargs takes NAME=VALUE, each name once, a value being a finite number"):
        parse_settings("--env-kwargs", ["b=1e3", word])


WORDS = st.one_of(
    st.sampled_from([f"--{flag}" for flag in FLAGS]),
    st.sampled_from(["0", "1", "-1", "nan", "1e400", "linear:1", "None", "True", "relu", "clip", "", "--", "-h=1"]),
    st.text(max_size=8).filter(lambda text: text not in ("-h", "--help") and "\0" not in text),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=8))
def test_arbitrary_arguments_exit_with_code_2_and_create_nothing(words, workdir, capsys):
    try:
        code = main(["train", "ppo", "Nowhere-v0", *words])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert capsys.readouterr().err
    assert list(workdir.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--hidden 64,64", "must be integers with spaces between them, got '64,64'; write 64 64"),
        ("--hidden [64]", "must be integers with spaces between them, got '[64]'; write 64"),
        ("--hidden []", "must be an integer, got '[]'"),
        ("--clip-obs x", "must be None or a number, got 'x'"),
        (
            "--temperature linear:1:0:2",
            "FRACTION of linear:START[:END[:FRACTION]] must be above 0 and at most 1, got 'linear:1:0:2'",
        ),
    ],
)
def test_the_error_says_what_to_write(words, said, command):
    code, _, err = command("train dqn CartPole-v1", words)
    assert (code, err) == (2, f"error: {words.split()[0]}: {said}\n")


@pytest.mark.parametrize(("flag", "value"), [("--network", "MLP"), ("--normalize-reward", "no")])
def test_values_that_are_no_choice_are_rejected(flag, value, command):
    code, _, err = command("train dqn CartPole-v1", f"{flag} {value}")
    assert code == 2 and err.startswith(f"error: {flag} must be one of '") and err.endswith(f"', got '{value}'\n")


@pytest.mark.parametrize(("words", "value"), [("--dueling True", "True"), ("--double=no", "no"), ("--no-noisy yes", "yes")])
def test_values_of_switches_are_rejected(words, value, command):
    code, _, err = command("train dqn CartPole-v1", words)
    assert code == 2 and err == f"error: unexpected {value}, as no flag takes it\n"


@pytest.mark.parametrize(
    "kind",
    [
        *(TrainFlags, NetworkFlags, ResumeFlags, EvaluateFlags, ExportFlags),
        *(PlotFlags, PackFlags, ReportFlags, RecordFlags, StudyFlags, UserFlags),
    ],
)
def test_no_help_breaks_where_the_source_does(kind):
    texts = {param.arg_name: param.description for param in docstring_parser.parse_from_object(kind).params}
    assert texts and not [name for name, text in texts.items() if "\n" in text]


def test_groups_of_flags_are_named_for_people(capsys):
    with pytest.raises(SystemExit):
        main(["train", "ppo", "CartPole-v1", "--help"])
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    # In a box, or bare where the output cannot print one.
    titles = re.findall(r"^[ ╭─]*([a-z][a-z -]*) options[ ─╮]*$", text, re.MULTILINE)
    assert titles == ["training", "user-defined agent and environment", "algorithm", "network", "intrinsic reward"]
