"""`bench/run.py drafters`: tiny drafters of every kind through the real measurement; what is projected."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import pytest

import drafter_report
import drafters
import peer_ours
import run as bench_run
from blockpilot import bundled
from blockpilot.cli.prompts import Prompt
from blockpilot.drafters.dflash_config import DFlashConfig
from blockpilot.drafters.eagle3_config import Eagle3Config
from blockpilot.drafters.specblock_config import SpecBlockConfig
from blockpilot.targets.config import ModelConfig
from drafter_times import times_of
from peer_types import Request, Run, Setup
from roofline_devices import find_device
from roofline_drafters import projected, step_terms_of
from roofline_models import find_model, values
from roofline_terms import WEIGHTS, Load, step_terms, verify_terms
from tests.eagle3 import eagle3_config, save_eagle3_drafter
from tests.engine.pair import VOCAB, write_tokenizer
from tests.implementations import require
from tests.specblock import save_specblock_drafter, specblock_config
from tests.tiny import save_drafter, save_target

PROMPTS = [Prompt(f"{name}/{i}", name, f"{name} {i}") for name in ("alpha", "beta") for i in range(2)]
SMALL = [
    "--max-new-tokens",
    "12",
    "--widths",
    "3",
    "--trees",
    "4/6",
    "--temperature",
    "0",
    "--temperature",
    "1",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny target and drafters; the EAGLE-3 one is in the folder of a training run."""
    root = tmp_path_factory.mktemp("drafters")
    target = save_target(root / "target", vocab=VOCAB)
    write_tokenizer(target)
    dflash, specblock = (
        save(root / name, target)
        for name, save in (("dflash", save_drafter), ("specblock", save_specblock_drafter))
    )
    run = root / "run"
    save_eagle3_drafter(run / "drafter", target)
    line = {"kind": "train", "step": 3, "blocks": 9, "tokens": 5, "cpu_seconds": 41.5, "loss": 1.0, "lr": 0.1}
    (run / "log.jsonl").write_text(json.dumps(line | {"accuracy": [0.5]}) + "\n")
    return {"target": target, "dflash": dflash, "specblock": specblock, "eagle3": run}


@pytest.fixture
def tiny(folders, monkeypatch):
    """The tiny target in place of SmolLM2, no bundled drafter, four prompts of made-up ids."""
    require("cpp")

    def prepare(prompts, temperatures, budget, threads):
        setup = Setup(folders["target"], (2,), 1, 64)
        return setup, [
            (p, [Request((3, 5 + i), 7, t, budget) for t in temperatures]) for i, p in enumerate(PROMPTS)
        ]

    monkeypatch.setattr(drafters, "prepare", prepare)
    monkeypatch.setattr(drafters, "DRAFTERS", {"lookup": "lookup"})
    monkeypatch.setattr(drafters, "POLICIES", {})
    peer_ours.load.cache_clear()
    yield [f"--drafter={name}={folders[name]}" for name in ("dflash", "eagle3", "specblock")]
    peer_ours.load.cache_clear()


def test_every_kind_of_drafter(tiny, folders, tmp_path, capsys):
    file = tmp_path / "report.json"
    looked = [
        f"--drafter=both={folders['dflash']}+lookup",
        "--policy",
        "both=fixed:5",
        "--adapt",
        "specblock",
    ]
    assert bench_run.main(["drafters", *SMALL, *tiny, *looked, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    each = [f"{name}-{shape}" for name in ("dflash", "eagle3", "specblock") for shape in ("3", "4/6")]
    made = ["plain", "lookup-3", *each, "specblock+bandit-3", "both-3", "both-policy"]
    assert list(report["families"]) == made
    assert report["ok"] is True and set(report["results"]) == {"0", "1"}
    assert report["drafters"]["eagle3"]["cpu_seconds"] == 41.5
    assert report["drafters"]["dflash"]["cpu_seconds"] is None
    assert report["projected"]["label"] == "projected"
    for temperature, result in report["results"].items():
        assert set(result["datasets"]) == {"alpha", "beta"}
        guessed = report["projected"]["results"][temperature]["overall"]
        for name, found in result["overall"].items():
            assert found["identical"] is True and found["errors"] == 0
            if name == "plain":
                assert (found["tau"], guessed[name]["draft_share"], guessed[name]["ratio"]) == (None, 0, 1)
                assert found["draft_ms"] is None
                continue
            shape = name.partition("-")[2]
            assert shape == "policy" or found["draft_ms"] > 0
            if shape in ("3", "4/6"):
                rival = result["overall"][f"eagle3-{shape}"]["draft_ms"]
                assert found["draft_ratio"] == found["draft_ms"] / rival
            assert found["tau"] >= 1 and 0 < found["draft_share"] < 1 and 0 < guessed[name]["draft_share"] < 1
            speed = found["tau"] / guessed[name]["step_ms"] * 1e3
            assert guessed[name]["tokens_per_s"] == pytest.approx(speed)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "projected for H200" in shown and shown.rstrip().endswith("ours identical: yes")


def test_only_the_named_drafter_learns():
    arms = drafters.arms_of({"a": "x", "b": "y"}, {}, ["b"], ((3, None),), ())
    assert {name: options for name, (_, options, _) in arms.items()} == {
        "plain": {},
        "a-3": {"drafter": "x"},
        "b-3": {"drafter": "y"},
        "b+bandit-3": {"drafter": "y", "adapt": True},
    }


def test_an_answer_that_differs_is_told(tiny, monkeypatch, capsys):
    real = drafters.open_ours

    def opened(setup, *, width, **options):
        decode = real(setup, width=width, **options)
        if width != 3:
            return decode
        return lambda request: Run((9, *decode(request).token_ids[1:]), steps=1)

    monkeypatch.setattr(drafters, "open_ours", opened)
    assert bench_run.main(["drafters", "--quick", *SMALL, tiny[0], "--arms", "dflash"]) == 1
    assert "dflash-3 differs from plain" in capsys.readouterr().err


def test_a_clock_does_not_keep_its_engine(tiny, folders):
    llm = peer_ours.load(Setup(folders["target"], (2,), 1, 64), drafter=str(folders["dflash"]))
    clock, engine = times_of(llm), weakref.ref(llm)
    assert times_of(llm) is clock
    del llm, clock
    peer_ours.load.cache_clear()
    gc.collect()
    assert engine() is None


def test_shapes_that_a_drafter_lacks_are_skipped(tiny, capsys):
    options = ["--widths", "2,99", "--trees", "4/999", "--max-new-tokens", "4", "--temperature", "0", tiny[0]]
    assert bench_run.main(["drafters", *options]) == 0
    assert "skipped dflash-99: " in (shown := capsys.readouterr().out) and "skipped dflash-4/999: " in shown


def test_options_that_are_refused(tiny, capsys):
    for wrong in (
        ["--drafter", "x"],
        ["--widths", "1"],
        ["--trees", "4/x"],
        ["--trees", "6/4"],
        ["--gpu", "TPU"],
    ):
        with pytest.raises(SystemExit):
            bench_run.main(["drafters", *wrong])
    assert bench_run.main(["drafters", "--policy", "nobody=fixed:3"]) == 2
    assert bench_run.main(["drafters", "--adapt", "nobody"]) == 2
    assert bench_run.main(["drafters", "--arms", "nobody"]) == 2
    assert "got 'nobody'" in capsys.readouterr().err


def test_a_share_leaves_out_what_no_step_has():
    found = {"phase_s": {"policy": 9.0, "draft": 1.0, "verify": 5.0, "commit": 1.0, "host": 1.0}}
    results = {"0": {"overall": {"a": found, "b": {"phase_s": {}}}, "datasets": {}}}
    drafter_report.add_shares(results)
    assert found["draft_share"] == 0.25 and results["0"]["overall"]["b"]["draft_share"] is None


def smollm2():
    """Its config, as far as the roofline reads it."""
    stack, model = find_model("SmolLM2-135M").target, find_model("SmolLM2-135M")
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": stack.hidden,
            "intermediate_size": stack.intermediate,
            "num_hidden_layers": stack.layers,
            "num_attention_heads": stack.heads,
            "num_key_value_heads": stack.kv_heads,
            "vocab_size": model.vocab,
            "tie_word_embeddings": True,
        }
    )


def test_dflash_and_plain_are_those_of_the_roofline():
    model, target = find_model("SmolLM2-135M"), smollm2()
    config = DFlashConfig.from_json(json.loads((bundled.drafter_path() / "config.json").read_text()))
    listed = SimpleNamespace(listed=range(model.draft_vocab))
    drafter = SimpleNamespace(kind="dflash", config=config, block_size=6, _vocabulary=listed)
    load = Load(1, 100, 6)
    assert sorted(map(repr, step_terms_of(target, drafter, load))) == sorted(
        map(repr, step_terms(model, WEIGHTS["bf16"], load))
    )
    plain = verify_terms(model, WEIGHTS["bf16"], Load(1, 100, 1))
    assert (
        step_terms_of(target, None, Load(1, 100, 1))
        == step_terms_of(target, drafter, Load(1, 100, 1))
        == plain
    )
    tree = step_terms_of(target, drafter, load, 12)
    assert [t for t in tree if t.phase == "verify"] == verify_terms(model, WEIGHTS["bf16"], Load(1, 100, 12))


def of_draft(terms, name):
    return [t for t in terms if (t.phase, t.name) == ("draft", name)]


def test_passes_of_eagle3_and_specblock_by_hand(folders):
    target = ModelConfig.from_hf(json.loads((folders["target"] / "config.json").read_text()))
    h, vocab = target.hidden_size, 18
    config = Eagle3Config.from_json(eagle3_config(folders["target"]))
    eagle = SimpleNamespace(kind="eagle3", config=config, block_size=8, beam=8)
    layer = 2 * (2 * h * h + 2 * h * h + h * h + 3 * h * 2 * h)  # q, k and v of two inputs, o, the MLP
    for tree, rows in ((0, [1, 1, 1]), (16, [1, 8, 8])):
        terms = step_terms_of(target, eagle, Load(1, 10, 4), tree)
        assert [t.bytes for t in of_draft(terms, "layers")] == [layer] * 3
        assert [t.flops for t in of_draft(terms, "head")] == [2 * n * vocab * h for n in rows]
        assert [t.bytes for t in of_draft(terms, "beside")] == [2 * 3 * h * h, 0, 0]
    config = SpecBlockConfig.from_json(specblock_config(folders["target"]))
    block = SimpleNamespace(kind="specblock", config=config, block_size=5)
    for width, tree, rows in ((5, 0, [4]), (6, 0, [4, 4]), (3, 8, [4, 40]), (2, 8, [4])):
        terms = step_terms_of(target, block, Load(1, 10, width), tree)
        assert [t.flops for t in of_draft(terms, "head")] == [2 * n * vocab * h for n in rows]
        assert of_draft(terms, "beside")[0].bytes == 2 * values((h, 3 * h), (h, 3 * h), (h, 2 * h))
        assert of_draft(terms, "embedding")[0].bytes == 2 * h * 4 * width


def test_nothing_decoded_projects_nothing():
    found = projected([Run((1,), steps=0)], smollm2(), None, 64, find_device("H200"))
    assert set(found.values()) == {None}
