"""benchmarks/compare.py: what it says of two results files."""

import json

import pytest

from benchmarks import compare, report, result_files

WHO = {"shape": "8b", "candidate": "te_lite", "recipe": "bf16", "error": None}
ROWS = [WHO | {"module": m, "gpu_us": us, "wall_us": 2 * us} for m, us in (("Linear", 100.0), ("LayerNormMLP", 200.0))]


def files(folder, old, new, name="modules", other=None):
    paths = folder / "old.json", folder / "new.json"
    for path, rows, called in zip(paths, (old, new), (name, other or name), strict=True):
        result_files.write_results(path, called, rows, tree="t", device="cpu")
    return [str(path) for path in paths]


def changed(**columns):
    """ROWS with other numbers in the second."""
    return [ROWS[0], ROWS[1] | columns]


@pytest.mark.parametrize(
    ("new", "options", "status", "says"),
    [
        (ROWS, [], 0, "2 numbers compared, 0 slower, 0 missing"),
        (ROWS[::-1], [], 0, "0 slower, 0 missing"),
        (changed(gpu_us=209.0), [], 0, "1.045"),
        (changed(gpu_us=211.0), [], 1, "SLOWER 8b LayerNormMLP te_lite bf16: gpu_us 200.0 to 211.0"),
        (changed(gpu_us=211.0), ["--limit", "1.06"], 0, "0 slower"),
        (changed(wall_us=900.0), [], 0, "2.250"),  # shown; it does not decide
        (changed(wall_us=900.0), ["--columns", "wall_us"], 1, "SLOWER"),
        (changed(gpu_us=50.0), [], 0, "0.250"),
        (ROWS[:1], [], 1, "MISSING 8b LayerNormMLP te_lite bf16: gpu_us"),
        (changed(gpu_us=None), [], 1, "MISSING"),
        (changed(error="RuntimeError: no"), [], 1, "MISSING"),
        ([*ROWS, ROWS[0] | {"recipe": "current"}], [], 0, "only in the new file: 8b Linear te_lite current"),
        (ROWS, ["--columns", "step_us"], 1, "0 numbers compared"),
    ],
)
def test_what_decides(tmp_path, capsys, new, options, status, says):
    assert compare.main([*files(tmp_path, ROWS, new), *options]) == status
    assert says in capsys.readouterr().out


def test_columns_have_their_highest_median_and_lowest(tmp_path, capsys):
    compare.main(files(tmp_path, ROWS, changed(gpu_us=300.0)))
    lines = capsys.readouterr().out.splitlines()
    ratios = {line.split()[0]: line.split()[1:] for line in lines if line.split()[0] in ("highest", "median", "lowest")}
    assert ratios == {"highest": ["1.500", "1.000"], "median": ["1.250", "1.000"], "lowest": ["1.000", "1.000"]}


def test_files_of_two_benchmarks_are_refused(tmp_path, capsys):
    assert compare.main(files(tmp_path, ROWS, ROWS, other="peers")) == 1
    assert "must be of one benchmark" in capsys.readouterr().err
    assert compare.main(files(tmp_path, [*ROWS, ROWS[0]], ROWS)) == 1
    assert "two rows are ('8b', 'Linear'" in capsys.readouterr().err


def test_every_committed_row_has_a_name_of_its_own():
    contents = [json.loads(path.read_text()) for path in report.RESULTS.glob("*.json")]
    contents = [content for content in contents if content.get("name") in result_files.IDENTITY]
    assert len(contents) >= 10
    for content in contents:
        assert len(result_files.keyed(content)) == len(content["rows"])
        assert compare.compared(content, content, compare.COLUMNS, 1.0).holds()
