"""The page: its sections, its figures, that it needs nothing else, and what it refuses."""

from __future__ import annotations

import base64
import json
import re
import sys
from html import unescape

import pytest

from blockpilot.training.acceptance import label_table
from blockpilot.training.analysis import analyse
from blockpilot.training.page import build_page, read_inputs
from tests.training.calibrations import modelled
from tests.training.page_files import (
    bench_result,
    policy_report,
    write_bench,
    write_calibration,
    write_labels,
    write_log,
    write_policy,
)

pytest.importorskip("matplotlib")
LABEL_PARTS = ["tau", "locality", "accepted", "offsets"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return {
        "labels": [write_labels(folder / "mine.jsonl")],
        "policy_report": write_policy(folder / "policy.json"),
        "calibration": write_calibration(folder / "cal.json", widths=(1, 2, 4)),
        "training_log": write_log(folder / "log.jsonl"),
        "bench": [write_bench(folder / "bench.json")],
    }


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The page of every input."""
    return build_page(read_inputs(**files), tmp_path_factory.mktemp("page") / "all.html")


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures that take no time to draw."""
    monkeypatch.setattr("blockpilot.training.page.drawing.draw", lambda *args, **options: b"a picture")


def rows_of(page, section):
    """Rows of cells of a section's tables, as a reader sees them."""
    text = page.html.read_text(encoding="utf-8")
    inside = re.search(rf'<section id="{section}">(.*?)</section>', text, re.S).group(1)
    return [
        [unescape(c) for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", r)]
        for r in re.findall(r"<tr>(.*?)</tr>", inside)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["labels"], LABEL_PARTS),
        (["policy_report"], ["policy"]),
        (["calibration"], ["cost"]),
        (["training_log"], ["training"]),
        (["bench"], ["offsets", "bench"]),
        (["labels", "calibration"], [*LABEL_PARTS, "speed", "cost"]),
    ],
)
def test_a_section_appears_only_with_its_input(undrawn, files, tmp_path, given, expected):
    page = build_page(read_inputs(**{name: files[name] for name in given}), tmp_path / "r.html")
    assert [part.key for part in page.parts] == expected
    assert re.findall(r'<section id="(.*?)">', page.html.read_text()) == [*expected, "inputs"]
    assert sorted(tmp_path.iterdir()) == sorted([page.html, *page.images])


def test_all_inputs_make_all_sections(whole):
    assert [p.key for p in whole.parts] == [*LABEL_PARTS, "speed", "cost", "bench", "policy", "training"]


def test_the_first_line_says_what_was_measured_on_what(whole, undrawn, files, tmp_path):
    text = whole.html.read_text()
    body = text[text.index("<body>") :].splitlines()
    assert body[1] == (
        '<p class="subject">Measured: target fake-target with drafter fake-drafter; a processor, 2 threads; '
        "a processor, AVX2, 1 thread; python 3.12 and blockpilot 0.1.0, python 3.12.</p>"
    )
    alone = build_page(
        read_inputs(policy_report=files["policy_report"]), tmp_path / "p.html"
    ).html.read_text()
    assert "a pair that no input names; no input names the machine; nor the versions." in alone


def test_the_page_needs_nothing_else(whole):
    text = whole.html.read_text()
    for outside in ("http:", "https:", "<script", "<link", "url(", "@import", "srcset"):
        assert outside not in text
    sources = re.findall(r'src="(.*?)"', text)
    embedded = [base64.b64decode(s.removeprefix("data:image/png;base64,"), validate=True) for s in sources]
    assert embedded == [image.read_bytes() for image in whole.images]
    assert all(png.startswith(b"\x89PNG\r\n") for png in embedded) and len(embedded) == 9
    assert all(image.name.startswith("all-") and image.suffix == ".png" for image in whole.images)
    assert set(re.findall(r'href="(.*?)"', text)) == {f"#{p.key}" for p in whole.parts} | {"#inputs"}


def test_text_from_files_is_escaped(whole):
    assert "The predictor is 1 &lt; 2 &amp; so on." in whole.html.read_text()


def test_tau_and_locality_are_the_library_s(whole, files):
    table = label_table(files["labels"][0])
    found = analyse(table)
    assert whole.parts[0].numbers == {"mine.jsonl": found.to_dict()}
    rows = rows_of(whole, "tau")
    gain, noise = 100 * found.gain_over_best_fixed, 100 * found.noise.over_best_fixed.mean
    assert rows[1] == ["mine.jsonl", "1.675", "1.675 (width 4)", "1.700", f"{gain:+.1f} %", f"{noise:+.1f} %"]
    assert rows[3][:4] == ["all", "4", "1.425", "1.675"]
    assert rows[6:] == [["even", "2", "1.600", "2.150"], ["odd", "2", "1.250", "1.200"]]
    place = found.locality
    assert (place.differs, place.differs_lowest, place.within, place.tied) == (0.25, 0.5, 1, 0.25)
    assert rows_of(whole, "locality")[1] == ["mine.jsonl", "25.0 %", "50.0 %", "100.0 %", "25.0 %"]


def test_accepted_lengths_and_offsets_by_hand(whole):
    accepted = rows_of(whole, "accepted")
    assert accepted[1] == ["width 2", "57.5 %", "42.5 %", "", ""]  # 17 of 40 steps kept their one draft
    assert accepted[2] == ["width 4", "65.0 %", "15.0 %", "7.5 %", "12.5 %"]  # at least 1, 2, 3: 14, 8, 5
    offsets = rows_of(whole, "offsets")
    assert ["width 4", "35.0 %", "20.0 %", "15.6 %"] in offsets  # 14 / 40, 8 / 40, 5 / 32
    assert ["policy", "40.0 %", "10.0 %", "–"] in offsets


def test_speed_is_tau_over_measured_cost(whole):
    found = next(p for p in whole.parts if p.key == "speed").numbers["mine.jsonl"]
    context = 130 + 20  # mean prompt and half an answer
    assert found["context"] == context
    assert found["plain"][4] == pytest.approx(4000 / modelled(4, context, 1))
    assert found["tokens_per_s"][1][4] == pytest.approx(1000 * 1.675 / modelled(1, context, 4))
    assert found["tokens_per_s"][4][2] == pytest.approx(4000 * 1.425 / modelled(4, context, 2))
    rows = rows_of(whole, "speed")
    plain, wide = modelled(1, context, 1), modelled(1, context, 4)
    assert rows[3] == [
        "1 request", "4", "1.675", f"{wide:.2f}", f"{wide / plain:.2f}", f"{1675 / wide:.1f}",
        f"{1.675 * plain / wide:.2f}",
    ]  # fmt: skip
    assert rows_of(whole, "cost")[1][:2] == ["1", f"{modelled(1, 100, 1):.1f} (1.00×)"]


def test_unmeasured_widths_are_marked_or_left_out(undrawn, files, tmp_path):
    def widths(measured):
        calibration = write_calibration(tmp_path / "c.json", widths=measured)
        page = build_page(read_inputs(labels=files["labels"], calibration=calibration), tmp_path / "r.html")
        return (
            [row[1] for row in rows_of(page, "speed")[1:]] if "speed" in [p.key for p in page.parts] else None
        )

    assert widths((1, 2, 8)) == ["plain", "2", "4 *"] * 2
    assert widths((1, 2)) == ["plain", "2"] * 2
    assert widths((1, 8)) is widths((1,)) is None


def test_policy_bench_and_training_figures(whole):
    policy = rows_of(whole, "policy")
    assert policy[1] == ["best fixed (width 4)", "1.5", "1.25 to 1.625", "+0.1250", "-0.1250 to +0.2500"]
    assert policy[2] == ["predictor", "1.625", "1.375 to 1.75", "", ""]
    assert ["chosen", "1", "6"] in policy
    bench = rows_of(whole, "bench")
    assert bench[1] == ["policy", "all", "3", "3.3", "1.500", "20.0", "31.0", "1.55", "yes"]
    assert bench[3] == ["policy", "b", "3", "3.3", "–", "20.0", "–", "–", "NO"]
    training = rows_of(whole, "training")
    assert training[1] == ["100", "6.4 k", "1.00", "1.500", "2.000"]
    assert training[3] == ["accuracy", "40.0 %", "20.0 %", "10.0 %"]
    assert [row[0] for row in training[5:]] == ["blocks seen", "tokens seen", "CPU hours"]
    assert "not a measurement" in whole.html.read_text()


def test_several_label_files_have_pictures_of_their_own(undrawn, files, tmp_path):
    second = write_labels(tmp_path / "other.jsonl")
    page = build_page(read_inputs(labels=[*files["labels"], second]), tmp_path / "two.html")
    assert len({image.name for image in page.images}) == len(page.images) == 6
    assert [row[0] for row in rows_of(page, "tau")[1:3]] == ["mine.jsonl", "other.jsonl"]


def test_a_policy_report_is_read_whole(files):
    assert read_inputs(policy_report=files["policy_report"]).policy.to_dict() == policy_report()


def test_groups_and_halves_of_a_policy_report_are_shown(whole):
    rows = rows_of(whole, "policy")
    assert ["letter", "5", "1.5", "1.625", "1.75"] in rows and ["gsm8k", "5", "1.5", "1.625", "1.75"] in rows
    assert ["split half oracle", "1.438", "1.188 to 1.562"] in rows
    text = whole.html.read_text()
    assert "The default policy is the fixed width 4." in text and "Few prompts." in text


def test_a_policy_report_of_before_groups_is_read(tmp_path):
    report = policy_report()
    for key in ("loss", "seeds", "saved", "warnings", "predictor_us"):
        del report[key]
    for part in ("acceptance", "throughput"):
        for key in ("by_family", "by_dataset", "evaluation", "split_half"):
            report[part].pop(key, None)
    policy = read_inputs(policy_report=write_policy(tmp_path / "old.json", report)).policy
    assert policy.seeds is None and policy.acceptance.by_family == {} and policy.throughput.split_half is None


def broken(report, *path, value=None):
    """`report` with one place replaced."""
    place = report
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return report


OVERALL = ("arms", "policy", "overall")


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("policy_report", "[]", "expected the JSON object of a policy report"),
        ("policy_report", "{", "expected the JSON of a policy report"),
        ("policy_report", {}, "what `blockpilot train-policy --report` writes"),
        ("policy_report", broken(policy_report(), "acceptance", "regret"), "regret"),
        (
            "policy_report",
            broken(policy_report(), "acceptance", "picks", value={"2": 1}),
            "picks and best widths",
        ),
        ("policy_report", broken(policy_report(), "tau_by_width", "2", "low", value="x"), "low"),
        ("bench", {}, "what `blockpilot bench` writes"),
        ("bench", broken(bench_result(), "arms", value={}), "no arms"),
        ("bench", broken(bench_result(), *OVERALL, "tau", value="1.5"), "tau"),
        ("bench", broken(bench_result(), *OVERALL, "width", value=[]), "width"),
        ("bench", broken(bench_result(), "settings", "pair", value="alone"), "bench"),
        ("calibration", {}, "no calibration"),
        ("training_log", "{}\n", "line 1: expected an object with a kind"),
        ("labels", "{}\n", "expected a label file"),
    ],
)
def test_malformed_inputs_are_refused(tmp_path, kind, content, message):
    path = tmp_path / "broken.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    several = kind in ("labels", "bench")
    with pytest.raises(ValueError, match=message) as refusal:
        read_inputs(**{kind: [path] if several else path})
    assert "broken.json" in str(refusal.value)


@pytest.mark.parametrize("kind", ["labels", "policy_report", "calibration", "training_log", "bench"])
def test_missing_inputs_are_refused(tmp_path, kind):
    path = tmp_path / "absent"
    with pytest.raises(ValueError, match="absent: expected a readable"):
        read_inputs(**{kind: [path] if kind in ("labels", "bench") else path})


def test_labels_without_every_offset_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'p/0': expected kept and offered drafts at every offset"):
        read_inputs(labels=[write_labels(tmp_path / "l.jsonl", kept=[[1], [1]])])


def test_labels_without_a_pair_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected settings with a pair, got None"):
        read_inputs(labels=[write_labels(tmp_path / "l.jsonl", pair=None)])


def test_inputs_of_two_pairs_are_refused(files, tmp_path):
    other = write_calibration(tmp_path / "c.json", pair={"target": "fake-target", "drafter": "another"})
    with pytest.raises(
        ValueError, match=r"one pair, got .*fake-drafter in mine.jsonl and .*another in the cal"
    ):
        read_inputs(labels=files["labels"], calibration=other)


def test_no_input_is_refused():
    with pytest.raises(ValueError, match="expected at least one of labels"):
        read_inputs()


def test_without_matplotlib_it_is_refused_before_anything_is_written(files, tmp_path, monkeypatch):
    inputs = read_inputs(**files)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pictures need matplotlib"):
        build_page(inputs, tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []
