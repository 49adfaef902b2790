import re

import pytest

from polyak.studies.journal import Trial
from polyak.studies.page import describe_worth, write_page

ATTACK = "</script><script>window.attacked = 1</script>"
PRESET = Trial(0, "complete", {}, 1.0, (0.0, 2.0), fresh_scores=(0.0, 1.0, 2.0))
BEST = Trial(2, "complete", {"gamma": 0.987654, "hidden": [64]}, 9.0, (9.0,), fresh_scores=(7.0, 8.0, 9.0))


def test_a_page_has_all_trials_and_no_text_of_them_runs(tmp_path):
    pytest.importorskip("bokeh")
    failed = Trial(1, "failed", {"gamma": 1.0, "hidden": [8]}, None, error=ATTACK)
    pruned = Trial(3, "pruned", {"gamma": 0.9, "hidden": [8]}, 0.5)
    assert write_page(tmp_path / "study.html", f"ppo {ATTACK}", [PRESET, failed, BEST, pruned], BEST, {"gamma": 0.75})
    text = (tmp_path / "study.html").read_text()
    assert ATTACK not in text and text.count("&lt;/script&gt;") >= 2
    plain = re.sub("<[^>]*>", " ", text[text.index("<main") : text.index("</main>")])
    for word in ("complete", "pruned", "failed", "0.9877", "[64]", "0.75", "best, fresh seeds", "--preset"):
        assert word in plain
    assert "4" in re.search(r"trials</dt><dd>(\d+)", text)[1] and "2 complete, 1 pruned, 1 failed" in text


def test_a_missing_extra_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bokeh", None)
    monkeypatch.setitem(__import__("sys").modules, "bokeh.resources", None)
    assert not write_page(tmp_path / "study.html", "ppo", [PRESET], PRESET, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("best", "says"),
    [
        (PRESET, "No trial has a higher score than the preset's settings"),
        (BEST, "With 3 fresh seeds its mean is 8.0 (7.0 to 9.0), the preset's 1.0 (0.0 to 2.0): better."),
        (Trial(2, "complete", {}, 9.0, (9.0,), fresh_scores=(0.0, 1.0, 3.0)), "no different within the noise."),
        (Trial(2, "complete", {}, 9.0, (9.0,), fresh_scores=(-9.0, -8.0, -7.0)), ": worse."),
        # The means differ by 2.8 standard errors, which is the quantile of 4 degrees of freedom.
        (Trial(2, "complete", {}, 9.0, (9.0,), fresh_scores=(2.3, 3.3, 4.3)), "better."),
        (Trial(2, "complete", {}, 9.0, (9.0,), fresh_scores=(2.25, 3.25, 4.25)), "no different within the noise."),
        (Trial(2, "complete", {}, 9.0, (9.0,), fresh_scores=(90.0, 91.0)), "too few seeds for a comparison"),
        (Trial(2, "complete", {}, 9.0, (9.0,)), "No fresh seeds were trained"),
        (Trial(2, "complete", {}, 9.0, (9.0,), fresh_error="diverged"), "With fresh seeds a training failed: diverged."),
    ],
)
def test_the_worth_of_the_best_score_is_measured_with_fresh_seeds(best, says):
    text = describe_worth(best, PRESET)
    assert says in text and ("highest of several noisy scores" in text) == (best is not PRESET)
