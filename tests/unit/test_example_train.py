"""examples/gpt/train.py on one device, from the command line's arguments to the samples; seconds, not minutes."""

from pathlib import Path

import pytest
import torch
import yaml

from train import TrainingClock, draw_loss_curve, main

GPT_FOLDER = Path(__file__).parents[2] / "examples" / "gpt"


@pytest.fixture
def one_device(tmp_path: Path) -> Path:
    """tp2_pp2.yaml without its strategy: what this package adds must be the only difference."""
    config = yaml.safe_load((GPT_FOLDER / "tp2_pp2.yaml").read_text())
    del config["trainer"]["strategy"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def test_the_layouts_train_the_same() -> None:
    tp2, tp2_pp2 = (yaml.safe_load((GPT_FOLDER / name).read_text()) for name in ("tp2.yaml", "tp2_pp2.yaml"))
    for config in (tp2, tp2_pp2):
        del config["trainer"]["devices"]
        for name in ("tp", "pp", "microbatches"):
            config["trainer"]["strategy"]["init_args"].pop(name, None)
    assert tp2 == tp2_pp2


@pytest.mark.parametrize("steps", [4, 1], ids=["validated", "unvalidated"])
def test_fit_reports_draws_and_samples(
    steps: int, one_device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    # As after torchrun: the plain Trainer that samples must not take these for its own.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    small = {
        "trainer.accelerator": "cpu", "trainer.max_steps": steps, "trainer.val_check_interval": 2,
        "trainer.log_every_n_steps": 5 - steps, "trainer.enable_model_summary": "false",
        "model.n_layer": 1, "model.n_head": 2, "model.d_model": 16, "data.context": 16, "data.val_windows": 16,
    }  # fmt: skip
    args = ["train.py", "fit", f"--config={one_device}", f"--config={GPT_FOLDER / 'one_device.yaml'}"]
    monkeypatch.setattr("sys.argv", args + [f"--{name}={value}" for name, value in small.items()])
    main()
    shown = capsys.readouterr().out
    run = tmp_path / "runs" / "gpt" / "version_0"
    validated = steps > 1
    files = {"config.yaml", "hparams.yaml"} | ({"metrics.csv", "loss.png", "checkpoints"} if validated else set())
    assert {file.name for file in run.iterdir()} == files
    assert ("runs/gpt/version_0/loss.png" if validated else "none: nothing was logged") in shown
    assert f"{steps} steps" in shown and "tokens/s" in shown and "validation bits per byte" in shown
    assert ("none: no validation ran" in shown) == (not validated) and "nan" not in shown
    assert ("runs/gpt/version_0/checkpoints" in shown) == validated
    assert [prompt for prompt in ("def ", "class ", "import ") if (prompt in shown) != validated] == []


@pytest.mark.parametrize("val_bpb", ["7.9", ""])
def test_loss_curve_is_a_picture(val_bpb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axes: drawn.extend(axes.get_legend_handles_labels()[1]))
    (tmp_path / "metrics.csv").write_text(f"step,train_loss,val_bpb\n0,5.5,\n1,,{val_bpb}\n2,4.1,\n")
    assert Path(draw_loss_curve(tmp_path)).read_bytes().startswith(b"\x89PNG")
    assert drawn == (["train", "val"] if val_bpb else ["train"])


def test_the_clock_leaves_validation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr("train.time.perf_counter", lambda: next(times))
    clock, trainer = TrainingClock(), type("Trainer", (), {"sanity_checking": False})()
    clock.on_train_start(trainer, None)  # at 10
    clock.on_train_batch_end(trainer, None, None, (torch.zeros(4, 8), None), 0)
    clock.on_validation_start(trainer, None)  # at 13
    clock.on_validation_end(trainer, None)  # at 20
    clock.on_train_end(trainer, None)  # at 22
    assert (clock.tokens, clock.seconds) == (32, 5.0)
