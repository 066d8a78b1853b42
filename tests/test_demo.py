"""`memopt demo`, run through its command line, and the judgement that its exit status stands on."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memopt.__main__ import main
from memopt.demo import figure, networks, report
from memopt.demo.data import BATCH, Digits, load_digits
from memopt.demo.networks import RECIPES
from memopt.demo.rounding import FACTOR, STRETCH, Drift
from memopt.demo.train import Learner, Measured, Options, Trained, train

PNG = b"\x89PNG\r\n\x1a\n"


def demo(folder: Path, *options: str) -> SimpleNamespace:
    """Runs the command: its exit status, what it wrote, and the functions that read it."""
    png, record = folder / "demo.png", folder / "demo.json"
    status = main(["demo", "--out", str(png), "--json", str(record), *options])
    return SimpleNamespace(status=status, png=png, json=json.loads(record.read_text()))


# -- The command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory) -> SimpleNamespace:
    """All three networks, trained too little."""
    return demo(tmp_path_factory.mktemp("demo"), "--epochs", "1")


def test_networks_that_learn_and_stay_near_pass(tmp_path, monkeypatch, capsys):
    """What is asked of them is lowered to what two passes over the data teach."""
    monkeypatch.setattr(report, "ACCURACY", 0.5)
    run = demo(tmp_path, "--networks", "pool-first", "--epochs", "2")
    printed = capsys.readouterr()
    assert run.status == 0, printed.out
    assert run.json["passed"] and not run.json["networks"]["pool-first"]["faults"]
    assert "PASSED" in printed.out and "FAILED" not in printed.out
    assert run.png.read_bytes().startswith(PNG)
    assert str(run.png) in printed.out
    assert "46/46" in printed.err, "the progress bar reaches its end"


def test_networks_that_learn_too_little_fail(one_epoch):
    assert one_epoch.status == 1
    assert not one_epoch.json["passed"]
    for network in one_epoch.json["networks"].values():
        assert [fault.split(": ")[1][:20] for fault in network["faults"]] == [
            "of stock layers it r",
            "of memopt layers it ",
        ]


def test_convolutions_keep_a_fraction_of_the_bytes(one_epoch):
    assert set(one_epoch.json["networks"]) == set(RECIPES)
    for network in one_epoch.json["networks"].values():
        assert network["ratios"]["saved_by_convs"] >= 5
        assert network["ratios"]["saved_beyond"] >= 20
        assert network["ratios"]["saved"] >= 4
        assert network["ratios"]["peak"] > 1


def test_bytes_are_those_of_the_layers(one_epoch):
    """Counted by hand for "simple": float32 activations, int64 indices, 4-bit codes."""
    pooled = 20 * 12 * 12 + 50 * 4 * 4
    convolved = 20 * 24 * 24 + 50 * 8 * 8
    simple = one_epoch.json["networks"]["simple"]
    assert simple["stock"]["saved_beyond"] == BATCH * (4 * convolved + 8 * pooled)
    assert simple["memopt"]["saved_beyond"] == BATCH * pooled // 2
    inputs_and_weights = 4 * BATCH * (28 * 28 + 20 * 12 * 12) + 4 * (20 * 25 + 50 * 20 * 25)
    for build in ("stock", "memopt"):
        beyond = simple[build]["saved_by_convs"] - simple[build]["saved_beyond"]
        assert beyond == inputs_and_weights


def test_losses_start_alike_and_stay_near(one_epoch):
    for network in one_epoch.json["networks"].values():
        steps = math.ceil(1437 / BATCH)
        assert len(network["stock"]["losses"]) == len(network["memopt"]["losses"]) == steps
        assert network["stock"]["losses"][0] == pytest.approx(network["memopt"]["losses"][0])
        assert network["drift"]["typical"] <= network["drift"]["allowed"] < 1e-4
        assert len(network["drift"]["memopt"]) == steps // STRETCH


@pytest.mark.parametrize("layer", ["features.conv1", "features.conv2", "classifier"])
def test_a_gradient_that_is_1_percent_wrong_fails(layer, tmp_path, monkeypatch, capsys):
    def wrong(recipe: networks.Recipe, storage: str) -> networks.Network:
        network = with_memopt(recipe, storage)
        network.get_submodule(layer).weight.register_hook(lambda grad: 1.01 * grad)
        return network

    with_memopt = networks.with_memopt
    monkeypatch.setattr(networks, "with_memopt", wrong)
    monkeypatch.setattr(report, "ACCURACY", 0.0)
    run = demo(tmp_path, "--networks", "pool-first", "--epochs", "2")
    assert run.status == 1
    [fault] = run.json["networks"]["pool-first"]["faults"]
    assert "rounding explains" in fault
    assert "FAILED" in capsys.readouterr().out


def test_losses_of_nan_fail(tmp_path, monkeypatch):
    def broken(recipe: networks.Recipe, storage: str) -> networks.Network:
        network = with_memopt(recipe, storage)
        loss = network.loss
        network.loss = lambda images, labels: math.nan * loss(images, labels)
        return network

    with_memopt = networks.with_memopt
    monkeypatch.setattr(networks, "with_memopt", broken)
    monkeypatch.setattr(report, "ACCURACY", 0.0)
    run = demo(tmp_path, "--networks", "cross-entropy", "--epochs", "1")
    assert run.status == 1
    assert run.png.read_bytes().startswith(PNG)


def test_autocast_is_compared_with_float32(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ACCURACY", 0.0)
    run = demo(tmp_path, "--amp", "bf16", "--networks", "cross-entropy", "--epochs", "1")
    network = run.json["networks"]["cross-entropy"]
    assert run.status == 0, network["faults"]
    assert run.json["amp"] == "bfloat16"
    assert max(network["drift"]["precise"]) > 1e-5, "the yardstick is coarser than float32's"
    assert network["ratios"]["saved_by_convs"] >= 5
    assert network["ratios"]["saved_beyond"] >= 20
    assert "autocast to bfloat16" in capsys.readouterr().out


def test_fp16_scales_its_losses():
    """On few images: convolutions in float16 are slow on most CPUs."""
    digits = load_digits()
    few = Digits(*(getattr(digits, field.name)[:16] for field in fields(digits)))
    options = Options(torch.device("cpu"), amp=torch.float16, epochs=STRETCH)
    trained = train(RECIPES["cross-entropy"], few, options)
    assert trained.drift is not None and trained.drift.explained
    assert trained.memopt.losses[-1] < trained.memopt.losses[0]
    learner = Learner(networks.stock(RECIPES["simple"]), RECIPES["simple"], torch.float16)
    assert learner.scaler.get_scale() > 1


def test_compressed_inputs_are_judged_by_accuracy_only(one_epoch, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "ACCURACY", 0.0)
    run = demo(tmp_path, "--networks", "pool-first", "--epochs", "1", "--storage", "int4")
    compressed, kept = (r.json["networks"]["pool-first"] for r in (run, one_epoch))
    assert run.status == 0, compressed["faults"]
    assert compressed["memopt"]["saved"] < kept["memopt"]["saved"]
    assert compressed["stock"] | {"seconds": 0} == kept["stock"] | {"seconds": 0}
    assert compressed["drift"] is None
    assert "the losses are not compared" in " ".join(capsys.readouterr().out.split())


# -- What stops it before it trains ----------------------------------------------------------------


def test_missing_extras_name_the_command_that_installs_them(tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    assert main(["demo", "--out", str(tmp_path / "x.png")]) == 2
    error = capsys.readouterr().err
    assert "scikit-learn" in error and "pip install 'memopt[demo]'" in error


def test_files_that_cannot_be_written_stop_it(tmp_path, capsys):
    for options in (
        ["--out", str(tmp_path / "nowhere" / "x.png")],
        ["--out", str(tmp_path)],
        ["--out", str(tmp_path / "x.jpeg")],
        ["--json", str(tmp_path / "nowhere" / "x.json")],
    ):
        assert main(["demo", *options]) == 2
        assert options[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--networks", "simple,unheard-of"), ("--epochs", "0"), ("--epochs", "x"), ("--amp", "x")],
)
def test_wrong_options_stop_it(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", option, value])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err


# -- The parts -------------------------------------------------------------------------------------


def test_a_fifth_of_each_class_is_held_out():
    digits = load_digits()
    assert digits.train_images.shape == (1437, 1, 28, 28)
    assert digits.test_images.shape == (360, 1, 28, 28)
    assert digits.train_images.min() == 0 and digits.train_images.max() <= 1
    counts = digits.test_labels.bincount()
    assert counts.min() >= 35 and counts.max() <= 37
    first, again, other = (next(iter(digits.batches(seed)))[1] for seed in (0, 0, 1))
    assert first.equal(again) and not first.equal(other)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_the_builds_share_their_state_dict_and_their_function(recipe):
    stock, ours = networks.stock(recipe), networks.with_memopt(recipe)
    ours.load_state_dict(stock.state_dict())
    images, labels = torch.rand(4, 1, 28, 28), torch.arange(4)
    torch.testing.assert_close(ours.loss(images, labels), stock.loss(images, labels))
    assert ours(images).argmax(1).equal(stock(images).argmax(1))
    for build in (stock, ours):
        found = [
            [type(m) for m in stage]
            for stage, is_conv in networks.stages(build.features)
            if is_conv
        ]
        assert len(found) == 2 and all(issubclass(kinds[0], torch.nn.Conv2d) for kinds in found)
        assert {len(kinds) for kinds in found} == ({3} if build is stock else {1})


def test_the_same_seed_gives_the_same_result():
    digits = load_digits()
    options = Options(torch.device("cpu"), seed=3, epochs=1)
    before = torch.random.get_rng_state()
    one, other = (train(RECIPES["cross-entropy"], digits, options) for _ in range(2))
    assert one.memopt.losses == other.memopt.losses
    assert one.stock.losses == other.stock.losses
    assert torch.random.get_rng_state().equal(before), "the caller's generator is left alone"


def drifts(memopt: list[float], precise: list[float]) -> Drift:
    return Drift(torch.tensor(memopt), torch.tensor(precise), scale=0.0)


def test_rounding_explains_so_much():
    assert drifts([FACTOR] * 4, [1.0] * 4).explained
    assert not drifts([FACTOR * 1.01] * 4, [1.0] * 4).explained
    # One stretch in five in which a ReLU flips proves nothing; a third of them does.
    assert drifts([1.0, 1.0, 1.0, 1.0, 1e4], [1.0] * 5).explained
    assert not drifts([1.0, 1.0, 1e4], [1.0] * 3).explained
    assert not drifts([1.0, 1.0, math.nan], [1.0] * 3).explained


def test_a_drift_is_the_largest_difference_in_each_stretch():
    stock = [0.0] * (2 * STRETCH + 3)
    memopt = [*range(STRETCH), *([0.5] * STRETCH), 9.0, 9.0, 9.0]
    drift = Drift.between(stock, memopt, stock)
    assert drift.memopt.tolist() == [STRETCH - 1, 0.5]
    assert drift.precise.tolist() == [0.0, 0.0]


def result(name: str, **changes: Any) -> Trained:
    """A made-up outcome that passes, for what is shown of it."""
    stock = Measured([2.0, 1.0], 0.97, 0.01, 8 << 20, 6 << 20, 5 << 20, 9 << 20)
    ours = Measured([2.0, 1.1], 0.975, 0.02, 2 << 20, 1 << 20, 100 << 10, 6 << 20)
    drift = drifts([1.0], [1.0])
    return Trained(
        RECIPES[name],
        **{
            "stock": stock,
            "memopt": ours,
            "precise_losses": [2.0, 1.05],
            "drift": drift,
            **changes,
        },
    )


def test_the_table_says_how_they_compare():
    lines = report.table([result("simple"), result("pool-first")]).splitlines()
    assert max(map(len, lines)) <= 100
    row = next(i for i, line in enumerate(lines) if line.startswith("simple"))
    shown = [" ".join(line.split()) for line in lines[row : row + 3]]
    assert shown == [
        "simple stock 97.0 % 8.0 MiB 6.0 MiB 5.0 MiB 9.0 MiB 10.0 ms",
        "memopt 97.5 % 2.0 MiB 1.0 MiB 100 KiB 6.0 MiB 20.0 ms",
        "+0.5 points 4.0x less 6.0x less 51x less 1.5x less 2.0x more",
    ]
    assert "0.1 at most" in lines[row + 3] and "0.05" in lines[row + 3]


def test_the_verdict_names_what_failed():
    [sentence] = report.verdict([result("simple")])
    assert sentence.startswith("PASSED  1 network: 97.0 % or more") and "6.0 times less" in sentence
    poor = Measured([2.0, 1.1], 0.5, 0.02, 1, 1, 1, 1)
    wrong = report.verdict([result("simple"), result("pool-first", memopt=poor)])
    assert [line.split(":")[0] for line in wrong] == ["FAILED  pool-first"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_picture_is_the_same_every_time(count, tmp_path):
    results = [result(name) for name in list(RECIPES)[:count]]
    for name in ("one.png", "other.png"):
        figure.draw(results, tmp_path / name, "cpu")
    drawn = (tmp_path / "one.png").read_bytes()
    assert drawn.startswith(PNG)
    assert drawn == (tmp_path / "other.png").read_bytes()
