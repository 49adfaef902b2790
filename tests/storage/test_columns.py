import json
import os

import numpy as np
import pytest

from polyak.storage.columns import GrowingColumns, read_columns, read_last_row
from polyak.storage.run_files import RunError


def write(path, rows, end=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return path


def rows_of(count, every=None):
    """Rows whose length varies, each 1000 steps, with an evaluation in those after a multiple of `every`."""
    for n in range(1, count + 1):
        row = {"env_steps": 1000 * n + n % 3, "loss": n / 7, "text": 10.0 ** (n % 40)}
        if every and row["env_steps"] // every != (1000 * (n - 1) + (n - 1) % 3) // every:
            row["eval/mean_reward"] = float(n)
        yield row


def test_every_row_is_read_as_columns_with_nan_for_what_is_missing(tmp_path):
    rows = [{"env_steps": 1, "a": 1.5, "b": None}, {"env_steps": 2, "b": -3}, {"env_steps": 3, "c": 1e-300}]
    columns = read_columns(write(tmp_path / "m", rows, end='{"env_steps": 4, "a"'))
    expected = {"env_steps": [1, 2, 3], "a": [1.5, np.nan, np.nan], "b": [np.nan, -3, np.nan], "c": [np.nan, np.nan, 1e-300]}
    assert list(columns) == list(expected)
    for tag, values in expected.items():
        np.testing.assert_array_equal(columns[tag], values)
    assert list(read_columns(tmp_path / "m", tags=["c", "d"])) == ["env_steps", "c"]


def test_a_missing_file_has_no_rows(tmp_path):
    for max_rows in (None, 10):
        assert {tag: len(column) for tag, column in read_columns(tmp_path / "m", max_rows=max_rows).items()} == {"env_steps": 0}
    assert read_last_row(tmp_path / "m") is None


def test_a_sample_has_even_rows_both_ends_and_every_evaluation(tmp_path):
    path = write(tmp_path / "m", rows_of(5000, every=100_000), end='{"env_steps": 1')
    every, sample = read_columns(path), read_columns(path, max_rows=60, every=100_000)
    steps = sample["env_steps"]
    assert steps[0] == every["env_steps"][0] and steps[-1] == every["env_steps"][-1] and np.all(np.diff(steps) > 0)
    # 60 even rows, between which the 50 evaluations stand.
    assert 100 <= len(steps) <= 110 and np.diff(steps).max() <= 1.2 * 5_000_000 / 59
    rows = np.searchsorted(every["env_steps"], steps)
    for tag in every:
        np.testing.assert_array_equal(sample[tag], every[tag][rows])
    assert np.isfinite(sample["eval/mean_reward"]).sum() == np.isfinite(every["eval/mean_reward"]).sum() == 50


def test_evaluations_are_found_where_lines_and_steps_are_uneven(tmp_path):
    """As after a resumption with other settings: interpolation misses, and the part of the file is searched."""
    rng, rows, steps = np.random.default_rng(0), [], 0
    for n in range(4000):
        before, steps = steps, steps + int(rng.integers(1, 3000)) * (1 if n < 2000 else 20)
        row = {"env_steps": steps, "text": 0.0, **{f"tag{k}": 1.0 for k in range(int(rng.integers(0, 30)))}}
        if steps // 500_000 != before // 500_000:
            row["eval/mean_reward"] = 1.0
        rows.append(row)
    sample = read_columns(write(tmp_path / "m", rows), max_rows=200, every=500_000)
    wanted = [row["env_steps"] for row in rows if "eval/mean_reward" in row]
    assert sample["env_steps"][np.isfinite(sample["eval/mean_reward"])].tolist() == wanted


def test_a_sample_reads_a_small_part_of_a_long_file(tmp_path, monkeypatch):
    path, pread, counts = write(tmp_path / "m", rows_of(50_000, every=1_000_000)), os.pread, []

    def counted(descriptor, length, offset):
        counts.append(length)
        return pread(descriptor, length, offset)

    monkeypatch.setattr("os.pread", counted)
    sample = read_columns(path, max_rows=60, every=1_000_000)
    assert np.isfinite(sample["eval/mean_reward"]).sum() == 50
    assert sum(counts) < 0.1 * path.stat().st_size and len(counts) < 200


def test_a_short_file_is_read_as_a_whole(tmp_path):
    path = write(tmp_path / "m", rows_of(100))
    assert len(read_columns(path, max_rows=60)["env_steps"]) == 100


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not valid JSON"),
        ("[1]", r"line 2: must be a JSON object"),
        ('{"a": 1}', r"line 2: env_steps=null must be an integer"),
        ('{"env_steps": 1.5}', r"line 2: env_steps=1.5 must be an integer"),
        ('{"env_steps": 1, "a": "1.5"}', r"'a' must be a finite number or null in every row"),
        ('{"env_steps": 1, "a": true}', r"'a' must be a finite number or null in every row"),
        ('{"env_steps": 1, "a": [1]}', r"'a' must be a finite number or null in every row"),
        ('{"env_steps": 1, "a": 1e999}', r"'a' must be a finite number or null in every row"),
        (f'{{"env_steps": 1, "a": {"9" * 400}}}', r"'a' must be a finite number or null in every row"),
        ('{"env_steps": 1, "a": NaN}', r"line 2: not valid JSON: NaN is not JSON"),
        ('{"env_steps": 1, "a": ' + "[" * 100_000, r"line 2: JSON nested more than 64 deep"),
        ("\x00" * 50, r"line 2: not valid JSON"),
        # Two lines that are one object when joined.
        ('{"env_steps": 1\n"b": 2}', r"line 2: not valid JSON"),
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(tmp_path, line, message):
    path = tmp_path / "m"
    path.write_text(f'{{"env_steps": 0}}\n{line}\n{{"env_steps": 2}}\n')
    with pytest.raises(RunError, match=message):
        read_columns(path)


def test_a_damaged_line_in_a_sample_is_an_error_with_its_place(tmp_path):
    path = write(tmp_path / "m", rows_of(5000))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(byte if byte == 10 else 0 for byte in data[len(data) // 2 :])
    path.write_bytes(data)
    with pytest.raises(RunError, match=r"line at byte \d+: not valid JSON"):
        read_columns(path, max_rows=60, every=100_000)


def test_too_many_tags_are_an_error(tmp_path):
    path = write(tmp_path / "m", [{"env_steps": 1, **{str(n): 1 for n in range(10_001)}}])
    with pytest.raises(RunError, match="has 10,002 tags; at most 10,000 are read"):
        read_columns(path)


def test_the_last_complete_row_is_read_alone(tmp_path):
    path = write(tmp_path / "m", [{"env_steps": 1}, {"env_steps": 2, "long": 0, **{f"tag{n}": n for n in range(9000)}}])
    assert path.stat().st_size > 100_000
    assert read_last_row(path)["env_steps"] == 2
    with path.open("a") as file:
        file.write('{"env_steps": 3')
    assert read_last_row(path)["tag8999"] == 8999
    path.write_text('{"env_steps": 1')
    assert read_last_row(path) is None
    path.write_text('{"env_steps": 1}\nx\n')
    with pytest.raises(RunError, match="last line: not valid JSON"):
        read_last_row(path)


def test_growing_columns_are_those_of_the_whole_file_at_every_moment(tmp_path):
    path = tmp_path / "metrics.jsonl"
    growing = GrowingColumns(path, max_rows=50)
    assert list(growing.read()) == ["env_steps"] and len(growing.read()["env_steps"]) == 0
    lines = [json.dumps({"env_steps": n} | ({"a": n / 2} if n % 2 else {"b": None, "c": -n})) + "\n" for n in range(1, 61)]
    for n, line in enumerate(lines, 1):
        with path.open("a") as file:
            file.write(line[: len(line) // 2])
            file.flush()
            assert len(growing.read()["env_steps"]) == n - 1
            file.write(line[len(line) // 2 :])
        got, wanted = growing.read(), read_columns(path)
        assert got.keys() == wanted.keys()
        for tag in wanted:
            np.testing.assert_array_equal(got[tag], wanted[tag])
    assert growing.read() is growing.read()


@pytest.mark.parametrize("every", [40, 1])
def test_growing_columns_keep_the_evaluations_of_a_long_file_if_they_are_few(tmp_path, every):
    path = tmp_path / "metrics.jsonl"
    growing = GrowingColumns(path, max_rows=10)
    for n in range(1, 200):
        with path.open("a") as file:
            file.write(f'{{"env_steps": {n}, "eval/mean_reward": {"null" if n % every else n}}}\n')
        columns = growing.read()
        assert columns["env_steps"][-1] == n and len(columns["env_steps"]) <= 20
    if every == 40:
        for rewards in (columns["eval/mean_reward"], GrowingColumns(path, max_rows=10).read(40)["eval/mean_reward"]):
            assert rewards[~np.isnan(rewards)].tolist() == [40, 80, 120, 160]


def test_growing_columns_keep_some_rows_of_a_long_file_and_begin_anew_with_a_replaced_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    growing = GrowingColumns(path, max_rows=10)
    for n in range(1, 200):
        with path.open("a") as file:
            file.write(f'{{"env_steps": {n}}}\n')
        steps = growing.read()["env_steps"]
        assert steps[0] == 1 and steps[-1] == n and len(steps) <= 20 and (np.diff(steps) > 0).all()
    assert len(steps) >= 10
    # A resumption drops rows, and writes others.
    (tmp_path / "new").write_text('{"env_steps": 1}\n{"env_steps": 7}\n')
    (tmp_path / "new").rename(path)
    assert growing.read()["env_steps"].tolist() == [1, 7]
    path.unlink()
    assert growing.read()["env_steps"].tolist() == []
    path.write_text('{"env_steps": 3}\n')
    assert growing.read()["env_steps"].tolist() == [3]
    with path.open("a") as file:
        file.write("{]\n")
    with pytest.raises(RunError, match="a new line: not valid JSON"):
        growing.read()
