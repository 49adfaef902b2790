"""polyak pack: one file with a trained policy, which loads and is evaluated as the run is."""

import json
import shlex
import shutil
import zipfile

import numpy as np
import pytest

import polyak
from polyak.reports.model_card import public_command
from polyak.storage.run_directory import RunError


@pytest.fixture
def packed(run, command):
    code, out, err = command("pack run -o pole.zip")
    assert (code, err) == (0, "") and out.startswith("wrote pole.zip (")
    return run.parent / "pole.zip"


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_packed_policy_acts_as_that_of_the_run(run, packed):
    ours, theirs = polyak.load_policy(packed), polyak.load_policy(run)
    shutil.rmtree(run)
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.testing.assert_array_equal(ours.predict(obs)[0], theirs.predict(obs)[0])


def test_a_pack_is_evaluated_as_its_run_is(run, packed, command):
    of_run, of_pack = (command("evaluate", path, "--episodes 4") for path in ("run", "pole.zip"))
    assert of_pack == of_run and of_run[0] == 0


def test_a_pack_has_the_runs_files_without_its_machine(run, packed):
    found = members(packed)
    number = max(path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    checkpoint = {f"checkpoints/{number}/{name}" for name in ("COMMIT", "arrays.safetensors", "manifest.json")}
    assert set(found) == {"README.md", "config.json", "system.json", "summary.json", "metrics.jsonl", "curve.svg"} | checkpoint
    assert found["config.json"] == (run / "config.json").read_bytes()
    assert found["metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
    assert json.loads(found["summary.json"]) == json.loads((run / "summary.json").read_bytes())
    assert str(run.parent).encode() not in b"".join(found.values())
    saved = len((run / "checkpoints" / number / "arrays.safetensors").read_bytes())
    assert len(found[f"checkpoints/{number}/arrays.safetensors"]) < saved


def test_the_card_has_score_settings_and_versions(run, packed):
    card = members(packed)["README.md"].decode()
    summary = json.loads((run / "summary.json").read_bytes())
    assert card.startswith("---\nlibrary_name: polyak\n") and card.count("\n---\n") == 1
    assert (
        f"{summary['eval_mean_return']:.1f} ± {summary['eval_std_return']:.1f} over {summary['eval_episodes']} episodes" in card
    )
    assert '{name: "CartPole-v1", type: "CartPole-v1"}' in card and "| `jax` |" in card and "| `gamma` |" in card


@pytest.mark.parametrize("words", ["pack run -o pole.zip", "export run --format numpy"])
@pytest.mark.parametrize("flags", ["--env mine:make", "--env-kwargs frameskip=2", "--import mine"])
def test_flags_of_an_environment_need_an_agent(words, flags, run, command):
    code, _, err = command(words, flags)
    assert code == 2 and f"error: {flags}: has no effect without --agent; leave it out" in err, err


def test_texts_of_a_run_stay_texts_in_the_card(run, command):
    summary = json.loads((run / "summary.json").read_bytes())
    system = json.loads((run / "system.json").read_bytes())
    words = ["/secret/bin/polyak", "train", "ppo", "X", "--run-dir", "/secret/runs", "--env", "a|```\n# c"]
    (run / "system.json").write_text(json.dumps(system | {"command_line": words, "packages": {"<b>": "|x"}}))
    (run / "summary.json").write_text(json.dumps(summary))
    assert command("pack run -o pole.zip")[0] == 0
    card = members(run.parent / "pole.zip")["README.md"].decode()
    assert "secret" not in card and "polyak train ppo X --env" in card
    assert "| `<b>` | `\\|x` |" in card and f"````sh\n{shlex.join(['polyak', *words[1:4], *words[6:]])}\n````\n" in card


def test_a_policy_of_an_agent_with_a_replay_is_packed_without_it(workdir, command):
    code, _, err = command("train dqn jax/CartPole-v1 --run-dir dqn --env-steps 300 --learning-starts 100 --eval-episodes 0")
    assert code == 0, err
    assert command("pack dqn -o dqn.zip")[0] == 0
    assert (workdir / "dqn.zip").stat().st_size < 1_000_000
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    ours, theirs = (polyak.load_policy(workdir / name).predict(obs)[0] for name in ("dqn.zip", "dqn"))
    np.testing.assert_array_equal(ours, theirs)


def test_a_score_of_another_policy_is_not_that_of_the_packed_one(run, command):
    summary = json.loads((run / "summary.json").read_bytes())
    (run / "summary.json").write_text(json.dumps(summary | {"env_steps": summary["env_steps"] - 1}))
    assert command("pack run -o pole.zip")[0] == 0
    card = members(run.parent / "pole.zip")["README.md"].decode()
    assert "Return of" not in card and "model-index" not in card


@pytest.mark.parametrize(
    ("words", "public"),
    [
        (["/a/bin/polyak", "train", "ppo", "X", "--run_dir", "/a"], ["polyak", "train", "ppo", "X"]),
        (["/a/polyak/__main__.py", "train", "ppo", "X", "--run-dir=/a"], ["polyak", "train", "ppo", "X"]),
        (["/a/mine/__main__.py", "--api-key", "secret"], []),
        (["/a/train.py", "--run-dir", "/a"], []),
        (None, []),
    ],
)
def test_command_lines_of_polyak_alone_are_published_without_the_run_directory(words, public):
    assert public_command({"command_line": words}) == public


def test_an_error_that_ended_the_training_is_published_without_its_text(run, command):
    summary = json.loads((run / "summary.json").read_bytes())
    (run / "summary.json").write_text(json.dumps(summary | {"stopped": "FileNotFoundError: '/secret/data'"}))
    assert command("pack run -o pole.zip")[0] == 0
    assert json.loads(members(run.parent / "pole.zip")["summary.json"])["stopped"] == "FileNotFoundError"


def test_the_newest_video_is_packed(run, command):
    (run / "videos").mkdir()
    for name in ("000000000100.mp4", "000000000200.mp4"):
        (run / "videos" / name).write_bytes(name.encode())
    assert command("pack run -o pole.zip")[0] == 0
    assert members(run.parent / "pole.zip")["video.mp4"] == b"000000000200.mp4"


def test_equal_runs_give_equal_files(run, packed, command):
    assert command("pack run -o again.zip")[0] == 0
    ours, theirs = members(packed), members(run.parent / "again.zip")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] in ([], ["README.md"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("pack", "a run directory is missing"),
        ("pack nowhere -o a.zip", "there is no such directory"),
        ("pack run -o a.tar", "output must end in .zip"),
        ("pack run -o nowhere/a.zip", "cannot be written"),
        ("pack run -o run/checkpoints/a.zip", "a file of a run"),
        ("pack run --best -o a.zip", "best: there is no best policy; evaluations during training (eval_every) save it"),
        ("pack run -o a.zip --output b.zip", "more than once"),
    ],
)
def test_bad_words_are_rejected_and_nothing_is_written(run, command, words, reason):
    code, _, err = command(words)
    assert code in (1, 2) and reason in err, err
    assert not list(run.parent.rglob("*.zip"))


def test_a_pack_of_a_policy_with_a_missing_file_is_an_error(packed, command):
    found = members(packed)
    del found[next(name for name in found if name.endswith("COMMIT"))]
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in found.items():
            archive.writestr(name, data)
    code, _, err = command("evaluate pole.zip")
    assert code == 2 and "no valid checkpoint" in err
    with pytest.raises(RunError, match="damaged"):
        packed.write_bytes(packed.read_bytes().replace(b'"gamma"', b'"GAMMA"'))
        polyak.load_policy(packed)
