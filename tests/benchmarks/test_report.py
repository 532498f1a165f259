"""Documents rendered from results."""

import json
from pathlib import Path

import pytest

from benchmarks import report, result_files, tables, tables_ranks

ROOT = Path(__file__).resolve().parents[2]


def fake_results(folder, device="NVIDIA H200"):
    shape = {"name": "small", "tokens": 512, "hidden": 2048, "ffn": 5632}
    keys = [("te_lite", "delayed", 81.4), ("torch", "bf16", 70.0), ("gemms", "fp8", 60.0)]
    rows = [
        {"shape": "small", "module": "Linear", "candidate": c, "recipe": r, "gpu_us": us, "host_us": 300.0}
        | {"wall_us": 310.0, "kept_mib": -0.0001, "tflops": 400.0, "samples": 20, "exposed": 0, "error": None}
        for c, r, us in keys
    ]
    content = result_files.write_results(
        folder / "modules.json", "modules", rows, tree="f" * 40, device="cpu", shapes=[shape]
    )
    content["device"] = device
    (folder / "modules.json").write_text(json.dumps(content))


def test_report_renders_between_markers(tmp_path):
    fake_results(tmp_path)
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- results:modules -->\nold 12345\n<!-- /results:modules -->\nafter\n")
    assert report.main(["--results", str(tmp_path), "--check", str(document)]) == 1
    assert report.main(["--results", str(tmp_path), str(document)]) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "12345" not in text
    # te_lite, its rate, the GEMMs and their share, torch, the published time and the ratio to it
    assert "| small | Linear | delayed | 81 | 400 | 60 | 0.74 | 70 | 99 | 0.82 |" in text
    assert "-0" not in text.replace("-0-", "")
    assert report.main(["--results", str(tmp_path), "--check", str(document)]) == 0


def write_fake(folder, name, rows, **extra):
    content = result_files.write_results(folder / f"{name}.json", name, rows, tree="f" * 40, device="cpu", **extra)
    content["device"] = "NVIDIA H200"
    (folder / f"{name}.json").write_text(json.dumps(content))


def page(*names):
    return "".join(f"<!-- results:{name} -->\n<!-- /results:{name} -->\n" for name in names)


def test_report_renders_what_recipes_cost(tmp_path):
    errors = {f"{kind}_{t}_pct": 3.0 + i for kind in ("rows", "columns") for i, t in enumerate(("y", "dx", "dw"))}
    common = {**errors, "samples": 4, "exposed": 0}
    rows = [
        {"recipe": "bf16", **common, "gpu_us": 2000.0, "wall_us": 2100.0, "kept_mib": 300.0, "error": None},
        {"recipe": "mxfp8", **common, "gpu_us": 2500.0, "wall_us": 2600.0, "kept_mib": 200.0, "error": None},
    ]
    shape = {"name": "8b", "tokens": 8192, "hidden": 4096, "ffn": 14336}
    write_fake(tmp_path, "recipes", rows, sizes=[2048, 4096, 4096], shape=shape)
    shards = [{**row, "tp": 4, **{f"{k}_y_pct": 1.5 for k in ("even", "uneven")}} for row in rows]
    write_fake(tmp_path, "per_shard", shards, sizes=[8192, 4096, 14336])
    gemm = {"m": 8192, "k": 4096, "n": 14336, "gpu_us": 10.0, "tflops": 700.0}
    write_fake(tmp_path, "gemms", [{**gemm, "gemm": "rowwise", "of_bf16": 1.8, "of_torch": None}])
    text = report.rendered(page("recipes", "per_shard", "gemms"), tmp_path)
    assert "| mxfp8 | 3.00 | 4.00 | 5.00 | 3.00 | 4.00 | 5.00 | 2500 | 0.80 | 2600 | 200 |" in text
    assert "| mxfp8 | 1.50 |  |  | 1.50 |  |  | 2500 | 0.80 | 2600 |" in text and "on 4 ranks" in text
    assert "| 8192 x 4096 x 14336 | rowwise | 10.0 | 700 | 1.80 |  |" in text


def test_the_front_page_has_gpu_times_of_large_shapes_and_wall_times_of_small_ones():
    rows = [
        {
            "shape": shape,
            "module": module,
            "recipe": "delayed",
            "call": call,
            "candidate": name,
            "gpu_us": us,
            "wall_us": 2 * us,
        }
        for shape, module, first in (("8b", "LayerNormMLP", 100), ("8b", "Linear", 200), ("small", "Linear", 300))
        for call, more in (("main_grad", 0), ("cached", 50))
        for name, us in (("te_lite", first + more + 1), ("te", first + more + 2), ("gemms", first + more + 3))
    ]
    known = dict.fromkeys(("device", "driver", "cuda", "torch", "triton", "python", "date", "tree"), "known")
    text = report.render_summary({**known, "shapes": [], "rows": rows})
    assert (
        "| 8b | LayerNormMLP | delayed | 101 | 102 | 103 |" in text
        and "| small | Linear | delayed | 602 | 604 |" in text
    )
    assert text.count("delayed") == 2


def test_how_far_apart_losses_are():
    assert tables.losses_apart([[1.0, 2.0]], [[1.0, 4.0]]) == 2**0.5
    assert tables.losses_apart([[1.0, 2.0], [1.0, 4.0]], [[1.0, 4.0]]) == 1.0


def test_report_says_what_was_not_measured(tmp_path):
    text = report.rendered(page(*report.RENDERERS), tmp_path)
    assert text.count("Not measured yet") == len(report.RENDERERS)
    document = tmp_path / "page.md"
    document.write_text(text)
    assert report.main(["--results", str(tmp_path), "--check", str(document)]) == 0


def test_report_refuses_cpu_results_and_unknown_tables(tmp_path):
    fake_results(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="measured on a CPU"):
        report.rendered("<!-- results:modules -->\n<!-- /results:modules -->\n", tmp_path)
    with pytest.raises(ValueError, match="no such table"):
        report.rendered("<!-- results:speed -->\n<!-- /results:speed -->\n", tmp_path)


def test_documents_match_the_committed_results():
    assert report.main(["--check"]) == 0, "run python benchmarks/report.py and commit what it writes"


@pytest.mark.parametrize(("picture", "file"), [("peers",) * 2, ("overlap_gemms",) * 2, ("overlap_mlp", "overlap")])
def test_pictures_are_of_the_committed_results(picture, file):
    drawn = (ROOT / "docs" / "img" / f"{picture}.png").read_bytes()
    said = report.provenance(report.load(report.RESULTS, file))
    assert said.encode() in drawn, f"run the script in benchmarks/ that draws {picture}.png, and commit it"


def test_times_measured_twice():
    row = {"op": "RS", "shape": "proj 70b", "dtype": "fp8", "candidate": "ring", "gpu_us": 100.0}
    rows = [row | {"again_us": 101.0}, row | {"again_us": 99.0}, row | {"candidate": "fused", "again_us": 96.0}]
    said = tables_ranks.measured_twice([*rows, row | {"gpu_us": None, "again_us": 5.0}])
    assert "1.0% apart (median), 4.0% at RS proj 70b fp8, fused." in said
    assert tables_ranks.measured_twice([row]) == ""


def test_exchanges_of_two_trees(tmp_path):
    common = {"old_share": 0.956, "new_share": 0.9, "error": None}
    rows = [common | {"row": f"RS proj 70b fp8 8192 2048 8192 {name}"} for name in ("ring", "fused")]
    criteria = {"no share of the limit lower by more than 0.01": False, "pairs >= 2": True}
    write_fake(tmp_path, "two_trees_tp4", rows, old_tree="a" * 40, pairs=2, criteria=criteria)
    text = report.rendered(page("two_trees_tp4"), tmp_path)
    assert "| RS | proj 70b | fp8 | 8192, 2048, 8192 | 0.956, 0.900 | 0.956, 0.900 |" in text
    assert "No share of the limit lower by more than 0.01: no; pairs >= 2: yes." in text and "`aaaaaaaaaaaa`" in text


def test_verbs_beside_their_peers(tmp_path):
    """Slower than a peer is bold, torch's scatters of symmetric inputs are not compared, failures are named."""
    who = {"shape": "fc1 8b", "dtype": "bf16", "gpu_us": 100.0, "against_nccl": 0.874, "against_symm_mem": 1.25}
    who |= {"verb": "all_gather", "error": None}
    rows = [who | {"candidate": "te_lite"}, who | {"candidate": "te_lite graph", "gpu_us": 90.0, "against_nccl": None}]
    rows += [who | {"candidate": "symm_mem symmetric", "gpu_us": 80.0}]
    wrong = who | {"verb": "reduce_scatter", "gpu_us": None, "against_nccl": None, "against_symm_mem": None}
    rows += [who | {"verb": "reduce_scatter", "candidate": "te_lite"}]
    rows += [who | {"verb": "reduce_scatter", "candidate": "symm_mem symmetric", "gpu_us": 1.0}]
    rows += [wrong | {"candidate": "symm_mem symmetric graph", "error": "wrong: by 50"}]
    write_fake(tmp_path, "verbs", rows, tp=4)
    text = report.rendered(page("verbs"), tmp_path)
    assert "| all_gather | fc1 8b | bf16 | 100 | **0.87** | 1.25 | 90 |  | 1.25 |" in text
    assert "memory already: all_gather 0.80 to 0.80." in text
    assert "failed: reduce_scatter fc1 8b, symm_mem symmetric graph (wrong: by 50)." in text


def test_megatron_over_ranks(tmp_path):
    row = {"candidate": "te_lite", "recipe": "delayed", "overlap": "on", "error": None, "tokens_s": 1000.4}
    row |= {"spread": 0.05, "over_te": 1.25, "speedup": 0.876, "off": [0.1, 0.7, 0.1], "peak_gib": 6.29}
    cut = {"candidate": "te", "recipe": "bf16", "overlap": "on", "error": "the time was up", "peak_gib": None}
    sizes = {"tp": 4, "pp": 1, "dp": 1, "micro_batches": 1, "distributed_optimizer": True, "layers": 4, "steps": 40}
    sizes |= {"micro_batch": 1, "sequence": 4096, "peers": {"transformer_engine": "2.20.2"}, "left_out": []}
    write_fake(tmp_path, "megatron_tp4_pp1", [row, cut], **sizes)
    text = report.rendered(page("megatron_tp4_pp1"), tmp_path)
    assert "| te_lite | delayed | on | 1000 | 0.05 | 1.25 | 0.88 | 0.70 (step 2) | 0.41 | 6.3 |" in text
    assert "| te\\* | bf16 | on |  |  |  |  |  |  |  |" in text and "\\* te bf16, overlap on: the time was up." in text
    assert "distributed optimizer" in text and "4096 tokens a step" in text


def test_experts_over_ranks(tmp_path):
    runs = [{"recipe": "bf16", "ep": 1, "train_ratio": 1.0, "held_out_ratio": 1.0, "held_out_loss": 1.5}]
    runs += [runs[0] | {"recipe": "current", "ep": 2, "train_ratio": 0.98, "held_out_loss": 1.49}]
    log = {"device": "cuda", "steps": 200, "unigram_entropy": 3.08, "worst": 0.02, "bound": 0.03, "runs": runs}
    (tmp_path / "moe.json").write_text(json.dumps(log | {"options": {"experts": 8, "top_k": 2}}))
    text = report.rendered(page("moe"), tmp_path)
    assert "| bf16 | 1.500 (0.0%) |  |" in text and "| current |  | 1.490 (2.0%) |" in text and "above 3%" in text
