"""Every bench runs, on tiny sizes, and writes its records."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parent.parent / "benches"
FIELDS = {
    "op": str,
    "case": str,
    "pass": str,
    "variant": str,
    "threads": int,
    "device": str,
    "torch": str,
    "memopt": str,
    "median_s": float,
    "q20_s": float,
    "q80_s": float,
    "ratio_to_best_stock": float,
    "saved_bytes": int,
    "saved_bytes_beyond_inputs": int,
    "peak_bytes": int,
}


@pytest.mark.parametrize("bench", sorted(BENCHES.glob("bench_*.py")), ids=lambda path: path.stem)
def test_bench_runs(bench, tmp_path, monkeypatch, capsys):
    records = tmp_path / "records.json"
    monkeypatch.syspath_prepend(str(BENCHES))
    monkeypatch.setattr(
        "sys.argv", [str(bench), "--quick", "--threads", "1", "--json", str(records)]
    )
    runpy.run_path(str(bench), run_name="__main__")

    rows = json.loads(records.read_text())
    for row in rows:
        assert {name: type(row[name]) for name in FIELDS} == FIELDS
        assert row["op"] == bench.stem.removeprefix("bench_")
        assert 0 < row["q20_s"] <= row["median_s"] <= row["q80_s"]
    for case in {row["case"] for row in rows}:
        for direction in ("forward", "forward_backward"):
            group = [r for r in rows if r["case"] == case and r["pass"] == direction]
            assert {"eager", "compile", "memopt"} <= {r["variant"] for r in group}
            assert any(r["ratio_to_best_stock"] == 1 for r in group)

    captured = capsys.readouterr()
    assert captured.out.count("memopt") >= len(rows) / 5
    assert "forward_backward" in captured.err  # the progress
